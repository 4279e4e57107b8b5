"""A stack of one's own: Kafka and PostgreSQL in one directory, up and down as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from sideline.errors import RefusedError
from sideline.stack import faults, kafka
from sideline.stack.jars import Progress
from sideline.stack.locks import locked
from sideline.stack.starting import KAFKA, Start, stop
from sideline.stack.state import DIRECTORY, POSTGRES, StackInfo, State, describe, load, save

BOTH = (KAFKA, POSTGRES)
MOST_BROKERS = 9


def _quiet(_what: str, _happens: str) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The embedded services of one directory; every call finds out anew what is there."""

    directory: Path = DIRECTORY

    def __post_init__(self) -> None:
        # Processes keep the path: it must not depend on where a command is called.
        object.__setattr__(self, "directory", self.directory.absolute())

    def up(
        self,
        *,
        brokers: int | None = None,
        fresh: bool = False,
        services: Collection[str] = BOTH,
        progress: Progress = _quiet,
    ) -> StackInfo:
        """Start what is not running and wait until it is ready; harmless when all is.

        ``brokers`` is kept from the last time when not given (at first: one). With ``fresh``
        everything that was in the stack is deleted before.
        """
        with self._alone(progress):
            state = None if fresh else load(self.directory)
            wanted = _brokers(state, brokers) if KAFKA in services else 0
            if fresh:
                progress("stack", "deleting what was in it")
                self._stop_all(progress)
                self._erase()
            state = state or State(cluster=kafka.new_cluster())
            start = Start(self.directory, state, progress)
            return start.run(brokers=wanted, database=POSTGRES in services)

    def down(self, *, progress: Progress = _quiet) -> bool:
        """Stop every service; data stay. Whether anything was meant to run."""
        if load(self.directory) is None:
            return False
        with self._alone(progress):
            return self._stop_all(progress)

    def status(self) -> StackInfo | None:
        """The stack that should be running, dead parts included; None if none should."""
        state = load(self.directory)
        return describe(self.directory, state) if state and state.wanted else None

    def _alone(self, progress: Progress) -> AbstractContextManager[None]:
        """One command at a time works on a stack."""
        with faults.explained("create", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            ignore = self.directory / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        return locked(
            self.directory / "lock",
            waiting=lambda: progress("stack", "waiting for another command"),
        )

    def _stop_all(self, progress: Progress) -> bool:
        state = load(self.directory)
        if state is None:
            return False
        for service in state.services:
            if service.alive:
                progress(service.name, "stopping")
        stop(state.services)
        idle = tuple(service.stopped() for service in state.services)
        save(self.directory, replace(state, services=idle))
        return state.wanted

    def _erase(self) -> None:
        """Delete data, logs and state, but not the lock that is held."""
        with faults.explained("delete what is in", self.directory):
            for entry in self.directory.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != "lock":
                    entry.unlink()


def _brokers(state: State | None, asked: int | None) -> int:
    """How many brokers to start; a stack keeps the number that it was made with."""
    known = len(state.brokers) if state else 0
    if asked is not None and not 1 <= asked <= MOST_BROKERS:
        raise RefusedError(
            f"a stack has 1 to {MOST_BROKERS} brokers, not {asked}.", hint="Try --brokers 3."
        )
    if asked is not None and known and asked != known:
        raise RefusedError(
            f"this stack was made with {known} broker{'s' if known > 1 else ''}, not {asked}.",
            hint=f"Delete it and begin anew: sideline stack up --fresh --brokers {asked}",
        )
    return asked or known or 1
