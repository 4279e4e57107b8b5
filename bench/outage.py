"""A PostgreSQL of its own that goes away for a while."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.services import Services
from sideline.stack import Stack

_ONLY = ("postgres",)
_LOOK_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Fragile:
    """Services whose database may be ended without harm to anybody else."""

    services: Services
    stack: Stack

    @classmethod
    @contextlib.contextmanager
    def started(cls, services: Services) -> Iterator[Fragile]:
        """Beside the given services, with their broker; gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="sideline-bench-outage-") as directory:
            stack = Stack(Path(directory))
            info = stack.up(fresh=True, services=_ONLY)
            try:
                yield cls(dataclasses.replace(services, database=info.database), stack)
            finally:
                stack.down()

    def end_for(self, seconds: float) -> float:
        """End the server at once, as a power cut would, and start it; how long it was away."""
        info = self.stack.status()
        if info is None:
            message = "PostgreSQL was gone already"
            raise RuntimeError(message)
        begun = time.monotonic()
        os.kill(info.pids["postgres"], signal.SIGQUIT)
        while (now := self.stack.status()) is not None and not now.dead:
            time.sleep(_LOOK_SECONDS)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        self.stack.up(services=_ONLY)
        return time.monotonic() - begun
