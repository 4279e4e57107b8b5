"""One at a time, across processes: a lock that ends with its holder, however that ends."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sideline.stack.faults import explained


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None], way: str = "--directory") -> Iterator[None]:
    """Hold the lock file ``path``; ``waiting`` is called once if another process holds it.

    ``way`` is what chooses another place for it.
    """
    with explained("write to", path.parent, way=way):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
