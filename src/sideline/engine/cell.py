"""Where a run's leases with care are worked: a process beside Spark's worker.

Spark's worker has threads by now, its own and the user's, and cannot be forked safely any more. A
keeper is forked from a process that has none: the nursery, which the daemon of our sessions
leaves behind when it begins. Where there is none, the keeper is a program of its own, and has to
load everything first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from sideline import loading
from sideline.engine.care import Keeper
from sideline.engine.lease import Lease, Report
from sideline.engine.worker import Access

if TYPE_CHECKING:
    from sideline.pipeline import Pipeline

FAREWELL_SECONDS = 3.0

# Inherited by all of a daemon's workers; closed by the kernel with the last of them.
_nursery: socket.socket | None = None


class Charge(NamedTuple):
    """What a keeper has to know; secrets go by a pipe, never by arguments or environment."""

    pipeline: bytes
    access: Access
    folders: tuple[str, ...]


class Cell:
    """A keeper in a process of its own, started when it is needed."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._connection: Connection | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Of the keeper, once there is one."""

    def work(self, lease: Lease, attempt: int = 0) -> Report:
        """Like a worker's."""
        try:
            connection = self._connection or self._start()
            connection.send((lease, attempt))
            answer: Report | Exception = connection.recv()
        except (EOFError, OSError):
            self._drop()
            crash = "the process that keeps careful workers was ended from outside"
            return Report(lease.round, socket.gethostname(), os.getpid(), crash=crash)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Let it end, with the user's teardown."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
                # Its end is the end of the connection.
                self._connection.poll(FAREWELL_SECONDS)
        self._drop()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            if not _bear(theirs):
                self._program = _run(theirs)
        self._connection = Connection(ours.detach())
        self._connection.send(self._charge)
        self.pid = self._connection.recv()
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.pid = 0
        if self._program is not None:
            self._program.wait()
            self._program = None


def open_nursery() -> None:
    """Leave a process behind that forks keepers; called while there is nothing but modules."""
    global _nursery
    _nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = os.fork()
        if not child:
            # Twice, so that it is nobody's child: whoever looks for the daemon's finds workers.
            if os.fork():
                os._exit(0)
            _nursery.close()
            _breed(theirs)
    os.waitpid(child, 0)


def _breed(requests: socket.socket) -> NoReturn:
    """In the nursery: a keeper for everyone who asks, until the daemon and its workers are gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    while True:
        message, handles, _, _ = socket.recv_fds(requests, 16, 1)
        if not message:
            os._exit(0)
        if not os.fork():
            requests.close()
            _begin_keeper(handles[0])
        os.close(handles[0])


def _bear(theirs: socket.socket) -> bool:
    """Have the nursery fork a keeper; whether there is one."""
    if _nursery is None:
        return False
    try:
        socket.send_fds(_nursery, [b"one"], [theirs.fileno()])
    except OSError:
        return False
    return True


def _run(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A keeper as a program: slow to begin, but nothing had to be prepared."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )


def _begin_keeper(handle: int) -> NoReturn:
    code = 1
    try:
        keep(handle)
        code = 0
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 - the last chance to say what happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def keep(handle: int) -> None:
    """Keep careful workers until whoever asked for it hangs up."""
    # Loaded here, with Spark, so that every fork has it.
    from sideline.engine.task import begin_logs  # noqa: PLC0415

    os.set_inheritable(handle, False)  # noqa: FBT003 - of no user's program
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    begin_logs()
    with Connection(handle) as connection:
        charge: Charge = connection.recv()
        connection.send(os.getpid())
        # While a lease is worked nobody says anything, unless he is gone.
        keeper = Keeper(charge.access, lambda: _load(charge), abandoned=connection.poll)
        with contextlib.suppress(EOFError):
            while (order := connection.recv()) is not None:
                try:
                    connection.send(keeper.work(*order))
                except Exception as error:  # noqa: BLE001 - raised again in Spark's worker
                    connection.send(error)
        keeper.close()


def _load(charge: Charge) -> Pipeline:
    loading.find_like(charge.folders)
    pipeline: Pipeline = pickle.loads(charge.pipeline)  # noqa: S301 - what the driver shipped
    return pipeline


if __name__ == "__main__":
    keep(int(sys.argv[1]))
