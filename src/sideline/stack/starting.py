"""One start of a stack: what it has begun is ended again when it does not succeed."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from sideline.errors import StackError
from sideline.stack import faults, kafka, ports, postgres
from sideline.stack.jars import Progress, broker_jars
from sideline.stack.java import find_java
from sideline.stack.kafka import Runtime
from sideline.stack.state import POSTGRES, Service, StackInfo, State, describe, log_file, save

KAFKA = "kafka"
# An empty stack takes 75 MB; below this the first events would fill the disk.
_NEEDED_BYTES = 200 << 20
_PORT_ATTEMPTS = 3


class Start:
    """Starts the services that are not running, and remembers each at once."""

    def __init__(self, directory: Path, state: State, progress: Progress) -> None:
        self.directory = directory
        self.state = state
        self.progress = progress
        self.begun: list[str] = []

    def run(self, *, brokers: int, database: bool) -> StackInfo:
        """Start that many brokers and PostgreSQL, if wanted; return when they are ready."""
        try:
            cluster = self._begin_brokers(brokers)
            if database:
                # Beside the brokers, which take longer.
                self._start_postgres()
            if cluster:
                self._await_brokers(cluster)
        except BaseException:
            self._undo()
            raise
        return describe(self.directory, self.state)

    def _start_postgres(self) -> None:
        known = self.state.find(POSTGRES)
        if known and known.alive:
            return
        self._say_dead(known)
        _check_space(self.directory)
        self.progress(POSTGRES, "preparing")
        postgres.prepare(self.directory)
        version = self._ready_postgres(_PORT_ATTEMPTS)
        self._remember_version(POSTGRES, version)
        self.progress(POSTGRES, f"ready on port {self.state.get(POSTGRES).port}")

    def _ready_postgres(self, attempts: int) -> str:
        """Start PostgreSQL, on another port if its own is taken meanwhile; its version."""
        server = self._placed(POSTGRES)
        self.progress(POSTGRES, "starting")
        self._keep_last_log(POSTGRES)
        self._remember(replace(server, process=postgres.start(self.directory, server.port)))
        try:
            return postgres.await_ready(self.directory, self.state.get(POSTGRES))
        except StackError:
            if attempts == 1 or not self._lost_port(POSTGRES):
                raise
            return self._ready_postgres(attempts - 1)

    def _begin_brokers(self, count: int) -> list[str]:
        """Start the brokers that are not running; the names of all, or of none if all were."""
        names = kafka.broker_names(count)
        known = [self.state.find(name) for name in names]
        if all(broker and broker.alive for broker in known):
            return []
        for broker in known:
            self._say_dead(broker)
        _check_space(self.directory)
        runtime = self._runtime()
        placed = [self._placed(name) for name in names]
        if [_ports(new) for new in placed] != [_ports(old) for old in known if old]:
            # Every broker knows the others by their ports.
            kafka.stop(placed)
        self.progress(KAFKA, "preparing")
        kafka.prepare(runtime, self.directory, placed, self.state.cluster)
        for broker in placed:
            if not broker.alive:
                self._begin_broker(runtime, broker)
        return names

    def _begin_broker(self, runtime: Runtime, broker: Service) -> None:
        self.progress(broker.name, "starting")
        self._keep_last_log(broker.name)
        self._remember(replace(broker, process=kafka.start(runtime, self.directory, broker)))

    def _await_brokers(self, names: Sequence[str], attempts: int = _PORT_ATTEMPTS) -> None:
        try:
            kafka.await_ready(self.directory, [self.state.get(name) for name in names])
        except StackError:
            lost = [name for name in names if self._lost_port(name)]
            if attempts == 1 or not lost:
                raise
            self._begin_brokers(len(names))
            self._await_brokers(names, attempts - 1)
            return
        for name in names:
            self.progress(name, f"ready on port {self.state.get(name).port}")

    def _runtime(self) -> Runtime:
        java = find_java()
        self.progress("java", f"{java.version} from {java.source}")
        runtime = Runtime(java, broker_jars(java, progress=self.progress))
        self._remember_version(KAFKA, runtime.version)
        self._remember_version("java", str(java.version))
        return runtime

    def _placed(self, name: str) -> Service:
        """The service with ports that it can have: the remembered ones, where they are free."""
        known = self.state.find(name)
        if known and known.alive:
            return known
        lost = [port for port in _ports(known) if not ports.is_free(port)] if known else []
        if known and not lost:
            return known.stopped()
        for port in lost:
            self.progress(name, f"port {port} was taken by somebody else, choosing another")
        placed = self._chosen(name)
        self._remember(placed)
        return placed

    def _chosen(self, name: str) -> Service:
        taken = {port for each in self.state.services for port in _ports(each)}
        first = ports.free_port(taken)
        second = None if name == POSTGRES else ports.free_port({*taken, first})
        return Service(name, first, second)

    def _lost_port(self, name: str) -> bool:
        """Whether the service ended because somebody took its port in the last moment."""
        said = faults.tail(log_file(self.directory, name))
        if self.state.get(name).alive or not any(words in said for words in faults.TAKEN):
            return False
        self._remember(self.state.get(name).stopped())
        return True

    def _remember(self, service: Service) -> None:
        """At once: whoever comes next must find the process, whatever happens to us."""
        self.state = self.state.having(service)
        if service.process:
            self.begun.append(service.name)
        save(self.directory, self.state)

    def _remember_version(self, name: str, version: str) -> None:
        self.state = replace(self.state, versions={**self.state.versions, name: version})
        save(self.directory, self.state)

    def _say_dead(self, service: Service | None) -> None:
        if service and service.process and not service.alive:
            self.progress(service.name, f"was not running any more (pid {service.process.pid})")

    def _keep_last_log(self, name: str) -> None:
        """A log tells of one start: the one before is kept, older ones are not."""
        log = log_file(self.directory, name)
        with faults.explained("write to", self.directory):
            if log.exists():
                log.replace(log.with_suffix(".log.1"))

    def _undo(self) -> None:
        """End what this start has begun; what ran before goes on."""
        if not self.begun:
            return
        begun = [self.state.get(name) for name in dict.fromkeys(self.begun)]
        stop(begun)
        for service in begun:
            self.state = self.state.having(service.stopped())
        save(self.directory, self.state)


def stop(services: Collection[Service]) -> None:
    """End those services; those that are not running are none the worse for it."""
    kafka.stop([service for service in services if service.name != POSTGRES])
    for service in services:
        if service.name == POSTGRES:
            postgres.stop(service)


def _ports(service: Service) -> list[int]:
    return [port for port in (service.port, service.controller_port) if port is not None]


def _check_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < _NEEDED_BYTES:
        raise StackError(
            f"only {free >> 20} MB are free for {directory}, "
            f"and the stack needs {_NEEDED_BYTES >> 20} MB.",
            hint="Free some space, or choose another place with --directory.",
        )
