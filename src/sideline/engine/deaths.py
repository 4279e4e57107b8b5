"""How a worker died, and whether the event in its hand is to blame.

What the process did to itself speaks against the event: a segmentation fault, an exit, memory
that ran out, a handler that never came back. A signal that somebody sent does not.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sideline.errors import HandlerTimeout, NonRecoverable, WorkerCrashed

# So many deaths with the same event in hand are no accident.
ENOUGH = 3
# What a watchdog ends its process with; the same as of timeout(1).
TIMEOUT_CODE = 124
# How faulthandler begins when it has waited too long.
_TIMEOUT_WORDS = "Timeout ("
# Whoever wants a process to go sends these; a handler's mistakes end in others.
_FROM_OUTSIDE = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGKILL,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Death(NamedTuple):
    """What the parent of a process learns of its end."""

    code: int
    """The exit code; negative: the signal."""
    out_of_memory: bool = False
    """Whether the kernel killed somebody for memory while the process lived."""
    last_words: str = ""
    """What faulthandler left."""

    @property
    def is_timeout(self) -> bool:
        """Whether a watchdog ended it."""
        return self.code == TIMEOUT_CODE or self.last_words.startswith(_TIMEOUT_WORDS)

    @property
    def counts(self) -> bool:
        """Whether it speaks against the event in hand."""
        return self.code >= 0 or -self.code not in _FROM_OUTSIDE or self.out_of_memory

    def __str__(self) -> str:
        """What happened, to follow "the worker"."""
        if self.is_timeout:
            return "was ended because the handler took longer than its handler_timeout"
        if self.out_of_memory and self.code == -signal.SIGKILL:
            return "was killed because memory ran out"
        if self.code >= 0:
            return f"exited with code {self.code}"
        name = _signal_name(-self.code)
        return f"died of {name}" if self.counts else f"was ended from outside by {name}"

    def error(self, times: int) -> NonRecoverable:
        """What the event fails with that was in hand; ``times``: how often."""
        often = f"{times} times"
        if self.is_timeout:
            error: NonRecoverable = HandlerTimeout(
                f"the handler took longer than its handler_timeout, {often}."
            )
        else:
            error = WorkerCrashed(f"the worker {self} while it handled this event, {often}.")
        if self.last_words:
            error.add_note(self.last_words)
        return error


def telling(words: str) -> str:
    """What faulthandler said that matters: why, and where the main thread was."""
    reason, _, rest = words.partition("\n")
    if _THREAD.match(reason):
        reason, rest = "", words
    threads = [part for part in rest.split("\n\n") if _THREAD.match(part.lstrip())]
    # The oldest thread comes last, and handlers run in it.
    return "\n".join([reason, *(part.strip() for part in threads[-1:])]).strip()


def oom_kills() -> int:
    """How many processes the kernel has killed for memory, as near to this one as it tells."""
    for path in _counters():
        with contextlib.suppress(OSError):
            found = _OOM_KILLS.search(path.read_text())
            if found:
                return int(found[1])
    return 0


def _counters() -> Iterator[Path]:
    """Of this process's own group first; then of the whole machine."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield Path(f"/sys/fs/cgroup/memory/{path}/memory.oom_control")
                # In a container the path is often the host's, and the root is the group itself.
                yield Path("/sys/fs/cgroup/memory/memory.oom_control")
            elif not controllers:
                yield Path(f"/sys/fs/cgroup/{path}/memory.events")
                yield Path("/sys/fs/cgroup/memory.events")
    yield Path("/proc/vmstat")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
