"""Start a command as another user, or detached from everything that started it.

Run as a script of its own (``python -I launch.py``), never imported by its caller: what happens
between fork and exec must not happen in a process with threads, and a process that is started
here has no parent that would have to wait for it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAPABILITY_VERSION = 0x20080522
_DAC_OVERRIDE = 1
_DAC_READ_SEARCH = 2


def become(uid: int, gid: int, *, reach: bool) -> None:
    """Give up root for good.

    With ``reach`` the one right is kept that lets the command pass through directories which
    only root may enter (a project or an environment below ``/root``).
    """
    right = _strongest_needed() if reach else None
    if right is not None:
        _prctl(_PR_SET_KEEPCAPS, 1, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if right is not None:
        _keep_only(right)
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, right)


def _strongest_needed() -> int | None:
    """The weakest right that suffices; containers often grant only the wider one."""
    permitted = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapPrm:")
    )
    return next((c for c in (_DAC_READ_SEARCH, _DAC_OVERRIDE) if permitted >> c & 1), None)


def _keep_only(right: int) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted, inheritable; first the lower 32 rights, then the upper.
    rights = (ctypes.c_uint32 * 6)(1 << right, 1 << right, 1 << right, 0, 0, 0)
    _checked(ctypes.CDLL(None, use_errno=True).capset(header, rights))


def _prctl(option: int, first: int, second: int) -> None:
    numbers = [ctypes.c_ulong(number) for number in (first, second, 0, 0)]
    _checked(ctypes.CDLL(None, use_errno=True).prctl(option, *numbers))


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def detach(log: Path) -> None:
    """Go on as a process without parent, terminal or open files; print its pid for the caller."""
    pid = os.fork()
    if pid:
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    silence = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(silence, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def main() -> None:
    """Parse what the caller asks for, then become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--user", help="UID:GID to become")
    parser.add_argument("--reach", action="store_true")
    parser.add_argument("--log", type=Path, help="detach, and write what it says here")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    wanted = parser.parse_args()
    command = wanted.command[1:] if wanted.command[:1] == ["--"] else wanted.command
    if wanted.log:
        detach(wanted.log)
    try:
        if wanted.user:
            uid, gid = map(int, wanted.user.split(":"))
            become(uid, gid, reach=wanted.reach)
        os.execv(command[0], command)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
