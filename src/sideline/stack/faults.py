"""What goes wrong on a machine, said in one sentence with the next step."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sideline.errors import StackError

_BY_ERRNO = {
    errno.ENOSPC: ("the disk is full", "Free some space, then try again."),
    errno.EDQUOT: ("the disk quota is used up", "Free some space, then try again."),
    errno.EROFS: ("it is on a read-only file system", "Choose another place with --directory."),
    errno.EACCES: (
        "you have no right to write there",
        "Change its owner or mode, or choose another place with --directory.",
    ),
    errno.EPERM: (
        "it belongs to somebody else",
        "Change its owner, or choose another place with --directory.",
    ),
    errno.ENOTDIR: ("a part of that path is a file", "Choose another place with --directory."),
    errno.ENAMETOOLONG: ("the path is too long", "Choose a shorter one with --directory."),
}

# Looked for in a service's own last words, in this order: the first that is found is the cause.
_BY_LAST_WORDS = (
    ("No space left on device", *_BY_ERRNO[errno.ENOSPC]),
    ("Disk quota exceeded", *_BY_ERRNO[errno.EDQUOT]),
    ("Read-only file system", *_BY_ERRNO[errno.EROFS]),
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

TAKEN = ("Address already in use", "Address in use", "Only one usage of each socket address")
"""What services say when somebody else holds their port."""


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a sentence about ``path``."""
    try:
        yield
    except OSError as error:
        raise refused(doing, path, error) from error


def refused(doing: str, path: Path, error: OSError) -> StackError:
    """The sentence for ``error`` while ``doing`` something with ``path``."""
    reason, hint = _BY_ERRNO.get(
        error.errno or 0, (error.strerror or str(error), "Choose another place with --directory.")
    )
    return StackError(f"cannot {doing} {path}: {reason}.", hint=hint)


def ended(name: str, last_words: str, log: Path) -> StackError:
    """The sentence for a service that ended by itself, from what it said last."""
    for words, reason, hint in _BY_LAST_WORDS:
        if words in last_words:
            return StackError(f"{name} ended: {reason}.", hint=f"{hint} Its log is {log}.")
    return StackError(
        f"{name} is not running any more.",
        hint=f"It was killed, or its log says why: {log}.",
    )


def tail(log: Path, size: int = 16_384) -> str:
    """The end of a log, or nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
