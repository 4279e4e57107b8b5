"""A stack of one's own: Kafka and PostgreSQL in one directory, up and down as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from sideline.errors import RefusedError, StackError
from sideline.stack import faults, kafka, ports, postgres
from sideline.stack.jars import Progress, broker_jars
from sideline.stack.java import find_java
from sideline.stack.kafka import Runtime
from sideline.stack.locks import locked
from sideline.stack.state import (
    DIRECTORY,
    POSTGRES,
    Service,
    State,
    StackInfo,
    describe,
    load,
    log_file,
    save,
)

KAFKA = "kafka"
BOTH = (KAFKA, POSTGRES)
MOST_BROKERS = 9
# An empty stack takes 75 MB; below this the first events would fill the disk.
_NEEDED_BYTES = 200 << 20
_LOG_BYTES = 10 << 20
_PORT_ATTEMPTS = 3


def _quiet(_what: str, _happens: str) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The embedded services of one directory; every call finds out what is there."""

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
            self._check_space()
            if fresh:
                progress("stack", "deleting what was in it")
                self._stop_all()
                self._erase()
            state = load(self.directory) or State(cluster=kafka.new_cluster())
            wanted = _wanted_brokers(state, brokers) if KAFKA in services else 0
            return _Start(self.directory, progress, state).run(wanted, POSTGRES in services)

    def down(self, *, progress: Progress = _quiet) -> bool:
        """Stop every service; data stay. Whether anything was meant to run."""
        if load(self.directory) is None:
            return False
        with self._alone(progress):
            return self._stop_all(progress)

    def status(self) -> StackInfo | None:
        """The stack that should be running, dead parts included; None if none should."""
        state = load(self.directory)
        return describe(self.directory, state) if state else None

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

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < _NEEDED_BYTES:
            raise StackError(
                f"Only {free >> 20} MB are free for {self.directory}, "
                f"and the stack needs {_NEEDED_BYTES >> 20} MB.",
                hint="Free some space, or choose another place with --directory.",
            )

    def _stop_all(self, progress: Progress = _quiet) -> bool:
        state = load(self.directory)
        if state is None:
            return False
        for service in state.services:
            if service.alive:
                progress(service.name, "stopping")
        _stop(state.services)
        save(
            self.directory,
            replace(state, services=tuple(service.stopped() for service in state.services)),
        )
        return any(service.process for service in state.services)

    def _erase(self) -> None:
        """Delete data, logs and state, but not the lock that is held."""
        with faults.explained("delete what is in", self.directory):
            for entry in self.directory.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != "lock":
                    entry.unlink()


class _Start:
    """One start: what it has begun is ended again if it does not succeed."""

    def __init__(self, directory: Path, progress: Progress, state: State) -> None:
        self.directory = directory
        self.progress = progress
        self.state = state
        self.begun: list[str] = []

    def run(self, brokers: int, database: bool) -> StackInfo:
        try:
            cluster = self._begin_brokers(brokers) if brokers else []
            if database:
                # While the brokers warm up.
                self._postgres()
            if cluster:
                self._await_brokers(cluster)
        except BaseException:
            self._undo()
            raise
        info = describe(self.directory, self.state)
        assert info is not None, "something was started"
        return info

    def _postgres(self) -> None:
        server = self.state.service(POSTGRES)
        if server and server.alive:
            return
        self._say_dead(server)
        self.progress(POSTGRES, "preparing")
        postgres.prepare(self.directory)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            server = self._placed(POSTGRES)
            self.progress(POSTGRES, "starting")
            self._fresh_log(POSTGRES)
            self._note(replace(server, process=postgres.start(self.directory, server.port)))
            try:
                version = postgres.await_ready(self.directory, self._get(POSTGRES))
                break
            except StackError:
                if attempt == _PORT_ATTEMPTS or not self._lost_port(POSTGRES):
                    raise
        self._version(POSTGRES, version)
        self.progress(POSTGRES, f"ready on port {server.port}")

    def _begin_brokers(self, count: int) -> list[str]:
        """Start the brokers that are not running; the names of all of them, if any was."""
        names = kafka.broker_names(count)
        known = [self.state.service(name) for name in names]
        if all(broker and broker.alive for broker in known):
            return []
        for broker in known:
            self._say_dead(broker)
        runtime = self._runtime()
        placed = [self._placed(name) for name in names]
        if any(new != old for new, old in zip(placed, known, strict=True)):
            # Every broker knows the others by their ports.
            kafka.stop(placed)
        self.progress(KAFKA, "preparing")
        kafka.prepare(runtime, self.directory, placed, self.state.cluster)
        for broker in placed:
            if not broker.alive:
                self.progress(broker.name, "starting")
                self._fresh_log(broker.name)
                self._note(replace(broker, process=kafka.start(runtime, self.directory, broker)))
        return names

    def _await_brokers(self, names: list[str]) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                kafka.await_ready(self.directory, [self._get(name) for name in names])
                break
            except StackError:
                lost = [name for name in names if self._lost_port(name)]
                if attempt == _PORT_ATTEMPTS or not lost:
                    raise
                self._begin_brokers(len(names))
        for name in names:
            self.progress(name, f"ready on port {self._get(name).port}")

    def _runtime(self) -> Runtime:
        java = find_java()
        self.progress("java", f"{java.version} from {java.source}")
        runtime = Runtime(java, broker_jars(java, progress=self.progress))
        self._version(KAFKA, runtime.version)
        self._version("java", str(java.version))
        return runtime

    def _placed(self, name: str) -> Service:
        """The service with ports that are its own: the remembered ones, where they are free."""
        known = self.state.service(name)
        if known and known.alive:
            return known
        taken = {port for each in self.state.services for port in _ports(each)}
        lost = [port for port in _ports(known) if not ports.is_free(port)] if known else []
        if known and not lost:
            return known.stopped()
        for port in lost:
            self.progress(name, f"port {port} was taken by somebody else, choosing another")
        first = ports.free_port(taken)
        second = ports.free_port({*taken, first}) if name != POSTGRES else None
        placed = Service(name, first, second)
        self._note(placed)
        return placed

    def _lost_port(self, name: str) -> bool:
        """Whether the service ended because somebody took its port in the last moment."""
        said = faults.tail(log_file(self.directory, name))
        if self._get(name).alive or not any(words in said for words in faults.TAKEN):
            return False
        self._note(self._get(name).stopped())
        return True

    def _get(self, name: str) -> Service:
        service = self.state.service(name)
        assert service is not None, name
        return service

    def _note(self, service: Service) -> None:
        """Remember at once: whoever comes next must find the process, whatever happens to us."""
        self.state = self.state.having(service)
        if service.process:
            self.begun.append(service.name)
        save(self.directory, self.state)

    def _version(self, name: str, version: str) -> None:
        self.state = replace(self.state, versions={**self.state.versions, name: version})
        save(self.directory, self.state)

    def _say_dead(self, service: Service | None) -> None:
        if service and service.process:
            self.progress(service.name, f"had ended by itself (pid {service.process.pid})")

    def _fresh_log(self, name: str) -> None:
        """Logs grow slowly; what is old enough to be big is kept once."""
        log = log_file(self.directory, name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))

    def _undo(self) -> None:
        """End what this start has begun; what ran before goes on."""
        begun = [self._get(name) for name in dict.fromkeys(self.begun)]
        _stop(begun)
        for service in begun:
            self.state = self.state.having(service.stopped())
        save(self.directory, self.state)


def _ports(service: Service) -> list[int]:
    return [port for port in (service.port, service.controller_port) if port is not None]


def _stop(services: Collection[Service]) -> None:
    kafka.stop([service for service in services if service.name != POSTGRES])
    for service in services:
        if service.name == POSTGRES:
            postgres.stop(service)


def _wanted_brokers(state: State, asked: int | None) -> int:
    """How many brokers to start; a stack with data keeps the number it was made with."""
    known = len(state.brokers)
    if asked is not None and not 1 <= asked <= MOST_BROKERS:
        raise RefusedError(
            f"A stack has 1 to {MOST_BROKERS} brokers, not {asked}.", hint="Try --brokers 3."
        )
    if asked is not None and known and asked != known:
        raise RefusedError(
            f"This stack was made with {known} broker{'s' if known > 1 else ''}, not {asked}.",
            hint=f"Delete it and begin anew: sideline stack up --fresh --brokers {asked}",
        )
    return asked or known or 1
