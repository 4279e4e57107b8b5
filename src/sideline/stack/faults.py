"""What goes wrong on a machine, said in one sentence with the next step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sideline.errors import StackError

_BY_ERRNO = {
    errno.ENOSPC: ("the disk is full", "Free some space, then try again."),
    errno.EDQUOT: ("the disk quota is used up", "Free some space, then try again."),
    errno.EROFS: ("it is on a read-only file system", "Choose another place with {way}."),
    errno.EACCES: (
        "you have no right to do that",
        "Change its owner or mode, or choose another place with {way}.",
    ),
    errno.EPERM: (
        "it belongs to somebody else",
        "Change its owner, or choose another place with {way}.",
    ),
    errno.ENOTDIR: ("a part of that path is a file", "Choose another place with {way}."),
    errno.EEXIST: ("it is a file", "Choose another place with {way}."),
    errno.ENAMETOOLONG: ("the path is too long", "Choose a shorter one with {way}."),
}

# Looked for in a service's own last words, in this order: the first that is found is the cause.
_BY_LAST_WORDS = (
    ("No space left on device", *_BY_ERRNO[errno.ENOSPC]),
    ("Check free disk space", *_BY_ERRNO[errno.ENOSPC]),
    ("Disk quota exceeded", *_BY_ERRNO[errno.EDQUOT]),
    (
        "Read-only file system",
        "its file system is read-only",
        "Make it writable, or use another --directory.",
    ),
    (
        "Failed to acquire lock on file",
        "another process uses its data",
        "End that process, or use another --directory.",
    ),
    (
        'lock file "postmaster.pid" already exists',
        "another PostgreSQL uses its data",
        "End that process, or use another --directory.",
    ),
    (
        "Cannot allocate memory",
        "the machine has no memory left",
        "End something else, then try again.",
    ),
    (
        "There is insufficient memory",
        "the machine has no memory left",
        "End something else, then try again.",
    ),
    (
        "OutOfMemoryError",
        "it ran out of memory",
        "Start it again with: sideline stack up",
    ),
    (
        "Permission denied",
        "it has no right to use a file that it needs",
        "Change the owner or mode of what the log names.",
    ),
)

_FULL_BYTES = 1 << 20

TAKEN = ("Address already in use", "Address in use", "Only one usage of each socket address")
"""What services say when somebody else holds their port."""


@contextmanager
def explained(doing: str, path: Path, *, way: str = "--directory") -> Iterator[None]:
    """Turn what the operating system refuses into a sentence about ``path``.

    ``way`` is what chooses another path.
    """
    try:
        yield
    except OSError as error:
        unknown = (error.strerror or str(error), "Choose another place with {way}.")
        reason, hint = _BY_ERRNO.get(error.errno or 0, unknown)
        message = f"cannot {doing} {path}: {reason}."
        raise StackError(message, hint=hint.format(way=way)) from error


def ended(name: str, last_words: str, log: Path) -> StackError:
    """The sentence for a service that ended by itself, from what it said last."""
    if _full(log.parent):
        # Not even its last words may have found a place.
        last_words = os.strerror(errno.ENOSPC)
    for words, reason, hint in _BY_LAST_WORDS:
        if words in last_words:
            return StackError(f"{name} ended: {reason}.", hint=f"{hint} Its log is {log}.")
    return StackError(
        f"{name} is not running any more.",
        hint=f"It was killed, or its log says why: {log}.",
    )


def _full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < _FULL_BYTES
    except OSError:
        return False


def tail(log: Path, size: int = 16_384) -> str:
    """The end of a log, or nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
