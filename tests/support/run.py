"""One test run: its directory, its processes, and nothing left of either when it ends.

Every process that a test starts inherits a token in its environment, so that it can be told
from all others on the machine. A guardian waits for the end of the run, however it comes
(a timeout ends pytest without any teardown), and clears away what is left then.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sideline.stack import Stack

TOKEN_VARIABLE = "SIDELINE_TEST_RUN"


class Run:
    """The directory and the token of this test run."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="sideline-test-"))
        self.token = secrets.token_hex(16)
        os.environ[TOKEN_VARIABLE] = self.token
        self.guardian = subprocess.Popen(
            [sys.executable, "-m", "tests.support.run", str(self.root), self.token],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE},
        )

    def directory(self, name: str) -> Path:
        """A new directory for one stack or one test."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))

    def leftovers(self, within_seconds: float = 60) -> list[str]:
        """What the run has left behind, after the time that an ending process may take."""
        deadline = time.monotonic() + within_seconds
        while (left := _processes(self.token)) and time.monotonic() < deadline:
            time.sleep(0.05)
        files = [f"directory {path}" for path in self.root.iterdir()]
        return [f"process {pid}: {command}" for pid, command in left.items()] + files

    def close(self) -> None:
        """Let the guardian clear away what is left, and wait for it."""
        assert self.guardian.stdin is not None
        self.guardian.stdin.close()
        self.guardian.wait(timeout=60)


def _processes(token: str) -> dict[int, str]:
    """The processes that were started, at whatever remove, by the run with that token."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Processes end while they are looked at, and those of others are none of our business.
        with suppress(OSError):
            command = _command(entry)
            if f"{TOKEN_VARIABLE}={token}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def _command(entry: Path, within_seconds: float = 1) -> bytes:
    """A process's command line, once it has one.

    In the midst of its exec a process has neither command nor environment yet, though whoever
    started it has been told already that all went well. Kernel threads and those that ended
    have none either, but no executable file as well, which is an OSError.
    """
    deadline = time.monotonic() + within_seconds
    while not (command := (entry / "cmdline").read_bytes()) and time.monotonic() < deadline:
        (entry / "exe").readlink()
        time.sleep(0.005)
    return command


def clear_away(root: Path, token: str) -> None:
    """End what still runs and delete what is still there."""
    for state in root.rglob("stack.json"):
        Stack(state.parent).down()
    for pid in _processes(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    clear_away(Path(sys.argv[1]), sys.argv[2])
