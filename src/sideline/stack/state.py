"""What is remembered of a stack between two commands, and what it says to those who ask."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sideline.errors import StackError
from sideline.stack.faults import ended, explained, tail
from sideline.stack.ports import LOOPBACK
from sideline.stack.processes import Identity

DIRECTORY = Path(".sideline")
_FILE = "stack.json"
_FORMAT = 1
POSTGRES = "postgres"
USER = "sideline"


@dataclass(frozen=True, slots=True)
class Service:
    """One server of the stack: its ports are remembered, its process only while it should run."""

    name: str
    port: int
    controller_port: int | None = None
    process: Identity | None = None

    @property
    def alive(self) -> bool:
        """Whether its process is running."""
        return self.process is not None and self.process.alive

    def stopped(self) -> Service:
        """The same service, not meant to run."""
        return replace(self, process=None)


@dataclass(frozen=True, slots=True)
class State:
    """All that ``stack.json`` holds."""

    cluster: str
    versions: dict[str, str] = field(default_factory=dict)
    services: tuple[Service, ...] = ()

    @property
    def brokers(self) -> tuple[Service, ...]:
        """The services that are Kafka brokers."""
        return tuple(service for service in self.services if service.name != POSTGRES)

    @property
    def wanted(self) -> bool:
        """Whether anything of it is meant to run."""
        return any(service.process for service in self.services)

    def find(self, name: str) -> Service | None:
        """The service of that name, if it was ever started here."""
        return next((service for service in self.services if service.name == name), None)

    def get(self, name: str) -> Service:
        """The service of that name, which is there."""
        return {service.name: service for service in self.services}[name]

    def having(self, changed: Service) -> State:
        """The state with that service added or replaced."""
        others = tuple(service for service in self.services if service.name != changed.name)
        return replace(
            self, services=tuple(sorted((*others, changed), key=lambda service: service.name))
        )


@dataclass(frozen=True, slots=True)
class StackInfo:
    """A stack that should be running: where its services are, and whether they live."""

    directory: Path
    services: tuple[Service, ...]
    versions: dict[str, str]
    database: str = field(repr=False)

    @property
    def up(self) -> bool:
        """Whether every service that should run does."""
        return all(service.alive for service in self.services)

    @property
    def dead(self) -> tuple[Service, ...]:
        """The services that should run and do not."""
        return tuple(service for service in self.services if not service.alive)

    @property
    def kafka(self) -> tuple[Service, ...]:
        """The Kafka brokers."""
        return tuple(service for service in self.services if service.name != POSTGRES)

    @property
    def brokers(self) -> int:
        """How many Kafka brokers the stack has."""
        return len(self.kafka)

    @property
    def bootstrap(self) -> str:
        """Kafka's bootstrap servers."""
        return ",".join(f"{LOOPBACK}:{broker.port}" for broker in self.kafka)

    @property
    def pids(self) -> dict[str, int]:
        """The process of each service that is running."""
        return {
            service.name: service.process.pid
            for service in self.services
            if service.process and service.alive
        }

    @property
    def database_address(self) -> str:
        """The database's URL without its password: libpq reads that from a file of ours."""
        port = next((service.port for service in self.services if service.name == POSTGRES), None)
        if port is None:
            return ""
        return (
            f"postgresql://{USER}@{LOOPBACK}:{port}/{USER}?passfile={password_file(self.directory)}"
        )

    def log(self, service: Service) -> Path:
        """Where a service writes what it has to say."""
        return log_file(self.directory, service.name)

    def problem(self, service: Service) -> StackError:
        """What is to be said of a service that has ended by itself."""
        log = self.log(service)
        return ended(service.name, tail(log), log)

    def as_dict(self) -> dict[str, Any]:
        """The stack as ``--json`` shows it: no secret among it."""
        return {
            "directory": str(self.directory),
            "up": self.up,
            "kafka": self.bootstrap,
            "database": self.database_address,
            "versions": self.versions,
            "services": [
                {
                    "name": service.name,
                    "alive": service.alive,
                    "pid": service.process.pid if service.process else None,
                    "port": service.port,
                    "log": str(self.log(service)),
                    "problem": None if service.alive else self.problem(service).message,
                }
                for service in self.services
            ],
        }


def current(directory: Path | None = None) -> StackInfo | None:
    """The stack that is up in ``directory`` (``./.sideline``).

    None if there is none, or if a part of it is dead. Quick: it reads one file and looks at
    processes, and asks no service.
    """
    home = (directory or DIRECTORY).absolute()
    state = load(home)
    info = describe(home, state) if state and state.wanted else None
    return info if info and info.up else None


def describe(directory: Path, state: State) -> StackInfo:
    """What is said of a stack: the services that are meant to run."""
    meant = tuple(service for service in state.services if service.process)
    return StackInfo(directory, meant, state.versions, _database(directory, meant))


def load(directory: Path) -> State | None:
    """The remembered state; None where there never was a stack."""
    file = directory / _FILE
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StackError(
            f"cannot read {file}: {error.strerror}.",
            hint="Run as the user who started the stack, or use another --directory.",
        ) from error
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(
            f"{file} is not the state of a stack.",
            hint=f"End its processes, remove {directory}, then: sideline stack up",
        ) from error


def save(directory: Path, state: State) -> None:
    """Remember ``state``, all of it or nothing."""
    file = directory / _FILE
    fresh = file.with_suffix(".new")
    with explained("write to", directory):
        fresh.write_text(json.dumps({"format": _FORMAT, **asdict(state)}, indent=2) + "\n")
        fresh.replace(file)


def password_file(directory: Path) -> Path:
    """The database's password, in the form that libpq reads; for its owner's eyes only."""
    return directory / POSTGRES / "pgpass"


def log_file(directory: Path, name: str) -> Path:
    """The log of the service of that name."""
    return directory / f"{name}.log"


def database_url(directory: Path, port: int, name: str = USER) -> str:
    """The URL of a database of the stack, password included."""
    password = password_file(directory).read_text().strip().rpartition(":")[2]
    return f"postgresql://{USER}:{password}@{LOOPBACK}:{port}/{name}"


def _database(directory: Path, services: tuple[Service, ...]) -> str:
    port = next((service.port for service in services if service.name == POSTGRES), None)
    if port is None:
        return ""
    with explained("read", password_file(directory)):
        return database_url(directory, port)


def _parse(content: dict[str, Any]) -> State:
    if content["format"] != _FORMAT:
        raise ValueError(content["format"])
    return State(
        cluster=content["cluster"],
        versions=content["versions"],
        services=tuple(_parse_service(service) for service in content["services"]),
    )


def _parse_service(content: dict[str, Any]) -> Service:
    process = content["process"]
    return Service(
        name=content["name"],
        port=content["port"],
        controller_port=content["controller_port"],
        process=Identity(**process) if process else None,
    )
