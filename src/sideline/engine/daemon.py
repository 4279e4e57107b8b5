"""The process that Spark forks its Python workers from, with what they need loaded already.

A worker of its own imports costs most of a second; the next round's tasks should be waiting
for the hand-over by then.
"""

from __future__ import annotations

import gc
import socket

from pyspark import daemon

import sideline.engine.task  # noqa: F401 - loaded here, so that every fork has it
from sideline.engine.cell import open_nursery

_work = daemon.worker


def work(sock: socket.socket, authenticated: bool) -> int:  # noqa: FBT001 - as Spark calls it
    """Serve tasks until Spark closes the connection, whatever it was in the middle of.

    The session's end is no reason for a traceback on the user's terminal.
    """
    try:
        return int(_work(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    daemon.worker = work
    gc.collect()
    gc.freeze()
    open_nursery()
    daemon.manager()
