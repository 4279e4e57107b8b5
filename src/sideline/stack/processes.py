"""Processes that outlive us: started detached, recognised again later, ended in time.

A pid alone proves nothing, it may have been given to somebody else since. So the moment of the
process's start is kept with it, in the kernel's own ticks, together with the boot it belongs to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAUNCH = Path(__file__).with_name("launch.py")
_POLL_SECONDS = 0.02
_PROC = Path("/proc")
_ZOMBIE = "Z"
_DEAD = "X"
# Fields of /proc/<pid>/stat after the name, which may itself hold blanks and brackets.
_STATE = 0
_START_TIME = 19


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, told apart from every other that has or will have its pid."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Whether this very process is still running."""
        return started(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class User:
    """Whom a command runs as; ``reach`` lets it pass through root's own directories."""

    uid: int
    gid: int
    reach: bool


def started(pid: int) -> str | None:
    """When the process with that pid was started; None if there is none, or it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[_STATE] in (_ZOMBIE, _DEAD):
        return None
    return f"{boot}/{fields[_START_TIME]}"


def command_name(pid: int) -> str | None:
    """The short name of a running process's command."""
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


def launched(command: Sequence[str | Path], *, log: Path | None, user: User | None) -> list[str]:
    """``command`` behind the launcher, which detaches it or changes its user."""
    return [
        sys.executable,
        "-I",
        str(_LAUNCH),
        *(["--log", str(log)] if log else []),
        *(["--user", f"{user.uid}:{user.gid}"] if user else []),
        *(["--reach"] if user and user.reach else []),
        "--",
        *map(str, command),
    ]


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path,
    environ: Mapping[str, str],
    directory: Path,
    user: User | None = None,
) -> Identity:
    """Start ``command`` detached in a session of its own; what it says goes to ``log``."""
    answer = subprocess.run(
        launched(command, log=log, user=user),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=dict(environ),
        cwd=directory,
        check=True,
        text=True,
    )
    pid = int(answer.stdout)
    # Ended already: it gets a start that no process has, so that it counts as dead.
    return Identity(pid, started(pid) or "ended")


def finish(
    command: Sequence[str | Path],
    *,
    environ: Mapping[str, str],
    directory: Path,
    user: User | None = None,
) -> tuple[int, str]:
    """Run ``command`` to its end, also when we are interrupted; its exit code and what it said.

    For commands that start others: killed in the middle they would leave those behind. In a session
    of its own, so that a terminal's Ctrl-C reaches us alone; a second one ends them all.
    """
    with subprocess.Popen(
        launched(command, log=None, user=user),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        cwd=directory,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate()
        except BaseException:
            _see_out(process)
            raise
    return process.returncode, said


def _see_out(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def end(process: Identity, *, how: signal.Signals, within_seconds: float) -> bool:
    """Ask the process to end, kill it when the time is over; whether it ended when asked."""
    if not send(process, how):
        return True
    if wait_ended(process, within_seconds):
        return True
    send(process, signal.SIGKILL)
    wait_ended(process, within_seconds)
    return False


def send(process: Identity, which: signal.Signals) -> bool:
    """Signal the process, if it is still this one."""
    if not process.alive:
        return False
    try:
        os.kill(process.pid, which)
    except ProcessLookupError:
        return False
    return True


def wait_ended(process: Identity, within_seconds: float) -> bool:
    """Wait for the process to end; whether it did within the time."""
    deadline = time.monotonic() + within_seconds
    while process.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
