"""Free ports on loopback."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

LOOPBACK = "127.0.0.1"

# Below the range from which the kernel takes ports for outgoing connections: a port that is
# remembered while the stack is down is not given away by accident.
_CHOICE = range(20_000, 32_000)
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on that port of loopback now."""
    with socket.socket() as server:
        # As servers do: connections that have just been closed do not count.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(besides: Collection[int] = ()) -> int:
    """A free port that is not among ``besides``."""
    for port in random.sample(_CHOICE, _TRIES):
        if port not in besides and is_free(port):
            return port
    raise OSError(None, f"none of {_TRIES} ports on {LOOPBACK} is free")


def answers(port: int) -> bool:
    """Whether somebody listens on that port of loopback."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((LOOPBACK, port)) == 0
