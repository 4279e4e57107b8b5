"""Where Kafka and the database are: flag > environment > sideline.toml > a stack that is up.

Read once per command. Everything wrong with the environment and the file is said at once,
and never with a password in it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sideline import kafka_properties
from sideline.errors import ConfigurationError
from sideline.masking import MASK, mask_database

FILE_NAME = "sideline.toml"
STACK_DIRECTORY = ".sideline"

_PREFIX = "SIDELINE_"
_PROPERTY_PREFIX = "SIDELINE_KAFKA__"
_FROM_STACK = f"stack in ./{STACK_DIRECTORY}"

# Environment names that other modules read. A name that nobody knows is refused: a mistyped
# SIDELINE_DATABASE must not end in whatever else is found.
READ_ELSEWHERE = {
    "SIDELINE_CACHE": "where downloaded jars are kept",
    "SIDELINE_CRASH_AT": "where a crash test wants the process killed",
    "SIDELINE_IVY_SETTINGS": "an Ivy settings file that names a company's mirror",
    "SIDELINE_KAFKA_JARS": "a directory of broker jars that are installed already",
}
# Switches of tests and of our own child processes.
_PRIVATE_PREFIXES = ("SIDELINE_TEST_", "SIDELINE_INTERNAL_")

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(:[0-9]+)?")
_PAIR = re.compile(r"\s*[a-z_]+\s*=\s*('(?:[^'\\]|\\.)*'|(?:\\.|[^\s\\'])*)(?=\s|$)", re.DOTALL)
_HIGHEST_PORT = 65535


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """What was configured, and where each part came from."""

    kafka: str | None = None
    """Bootstrap servers, ``host:port`` with commas between them."""
    database: str | None = None
    """A libpq URL or "key=value" string; may hold a password."""
    kafka_properties: dict[str, str] = dataclasses.field(default_factory=dict)
    """Client properties of librdkafka; may hold passwords."""
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Setting -> "flag", "environment ...", "sideline.toml", "stack in ./.sideline", "default"."""

    def require_kafka(self) -> str:
        """The bootstrap servers, or an error that says how to set them."""
        if self.kafka is None:
            raise _missing("Kafka", "SIDELINE_KAFKA", "localhost:9092")
        return self.kafka

    def require_database(self) -> str:
        """The database's URL, or an error that says how to set it."""
        if self.database is None:
            raise _missing("the database", "SIDELINE_DATABASE", "postgresql://user@host/name")
        return self.database

    def kafka_client(self, **extra: Any) -> dict[str, Any]:  # noqa: ANN401 - librdkafka's values
        """A configuration for a client of confluent-kafka."""
        return {"bootstrap.servers": self.require_kafka(), **self.kafka_properties, **extra}

    def shown(self) -> dict[str, str | None]:
        """Every setting as people may see it, secrets masked."""
        database = None if self.database is None else mask_database(self.database)
        shown = {"kafka": self.kafka, "database": database}
        for name, value in sorted(self.kafka_properties.items()):
            shown[f"kafka.{name}"] = MASK if name in kafka_properties.SECRET else value
        return shown

    def __repr__(self) -> str:
        """What `shown` says: a repr ends in logs."""
        return f"Settings({self.shown()!r})"


def load(
    *,
    kafka: str | None = None,
    database: str | None = None,
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Put the settings together; ``kafka`` and ``database`` are what flags said.

    ``directory`` (the current one) is where sideline.toml and .sideline are looked for.
    """
    directory = Path.cwd() if directory is None else directory
    draft = _Draft()
    draft.read_file(directory / FILE_NAME)
    draft.read_environment(os.environ if environ is None else environ)
    draft.read_flags(kafka=kafka, database=database)
    draft.refuse_problems()
    draft.read_stack(directory)
    return Settings(
        draft.values.get("kafka"), draft.values.get("database"), draft.properties, draft.origins()
    )


class _Draft:
    """The settings so far; each source that is read later overrides the ones before."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.properties: dict[str, str] = {}
        self.problems: list[str] = []
        self._origins: dict[str, str] = {}

    def origins(self) -> dict[str, str]:
        """Where each setting came from; the two main ones are always there."""
        return {"kafka": "default", "database": "default"} | self._origins

    def refuse_problems(self) -> None:
        """Say everything that was wrong, in one error."""
        if not self.problems:
            return
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = "".join(f"\n    {problem}" for problem in self.problems)
            message = f"the settings have {len(self.problems)} errors:{lines}"
        raise ConfigurationError(message, hint="What can be set is in docs/configuration.md.")

    def read_flags(self, **flags: str | None) -> None:
        """Take what the command line said."""
        for name, value in flags.items():
            if value is not None:
                self._take(name, value, f"--{name}", "flag")

    def read_environment(self, environ: Mapping[str, str]) -> None:
        """Take every SIDELINE_* name."""
        for name in sorted(environ):
            if not name.startswith(_PREFIX) or name.startswith(_PRIVATE_PREFIXES):
                continue
            origin = f"environment {name}"
            if name in {"SIDELINE_KAFKA", "SIDELINE_DATABASE"}:
                self._take(name.removeprefix(_PREFIX).lower(), environ[name], name, origin)
            elif name.startswith(_PROPERTY_PREFIX):
                property_name = name.removeprefix(_PROPERTY_PREFIX).lower().replace("_", ".")
                self._take_property(property_name, environ[name], name, origin)
            elif name not in READ_ELSEWHERE:
                known = ["SIDELINE_KAFKA", "SIDELINE_DATABASE", *READ_ELSEWHERE]
                self._complain(f"{name} is not a setting{_guess(name, known)}")

    def read_file(self, path: Path) -> None:
        """Take what sideline.toml says, if there is one."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except OSError as error:
            message = f"{path.name} cannot be read: {error.strerror}."
            raise ConfigurationError(message, hint=f"Check {path}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            # Neither quotes the file's text beyond one character, so no password either.
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"{error}"
            message = f"{path.name} is not valid TOML: {reason}."
            raise ConfigurationError(message, hint=f"Correct {path}.") from None
        for name, value in tables.items():
            self._take_table(name, value, path.name)

    def read_stack(self, directory: Path) -> None:
        """Fill what nobody configured from a stack that is up.

        Client properties without a broker are a configuration that lost its half: they must
        not find the embedded one.
        """
        missing = {"kafka", "database"} - set(self.values)
        if self.properties:
            missing.discard("kafka")
        if not missing or not (directory / STACK_DIRECTORY).is_dir():
            return
        from sideline import stack  # noqa: PLC0415 - only where it is needed: --help stays quick

        info = stack.current(directory / STACK_DIRECTORY)
        if info is None:
            return
        for name, value in (("kafka", info.bootstrap), ("database", info.database)):
            if name in missing and value:
                self.values[name], self._origins[name] = value, _FROM_STACK

    def _complain(self, problem: str) -> None:
        self.problems.append(problem if problem.endswith("?") else f"{problem}.")

    def _take(self, name: str, value: object, source: str, origin: str) -> None:
        if not isinstance(value, str):
            self._complain(f"{source} must be text")
            return
        problem = _bootstrap_problem(value) if name == "kafka" else _database_problem(value)
        if problem:
            self._complain(f"{source} {problem}")
        self.values[name] = ",".join(_servers(value)) if name == "kafka" else value
        self._origins[name] = origin

    def _take_property(self, name: str, value: str, source: str, origin: str) -> None:
        problem = kafka_properties.name_problem(name)
        problem = problem or kafka_properties.value_problem(name, value)
        if problem:
            self._complain(f"{source} {problem}")
            return
        self.properties[name] = value
        self._origins[f"kafka.{name}"] = origin

    def _take_table(self, name: str, value: object, file: str) -> None:
        inner = {"kafka": "bootstrap", "database": "url"}.get(name)
        if inner is None:
            guess = _guess(name, ["kafka", "database"])
            self._complain(f"{file}: {name!r} is not a setting{guess}")
        elif not isinstance(value, dict):
            self._take(name, value, f"{file}: {name}", file)
        else:
            for key, leaf in _leaves(value):
                source = f"{file}: {key!r} in [{name}]"
                if key == inner:
                    self._take(name, _joined(leaf), source, file)
                elif name == "kafka":
                    self._take_leaf(key, leaf, source, file)
                else:
                    self._complain(f"{source} is not a setting{_guess(key, [inner])}")

    def _take_leaf(self, name: str, leaf: object, source: str, origin: str) -> None:
        match leaf:
            case bool():
                text = "true" if leaf else "false"
            case str() | int():
                text = str(leaf)
            case _:
                self._complain(f"{source} must be text, a whole number, true or false")
                return
        if name in {"database", "url"}:
            # In TOML everything below a table's head belongs to that table.
            self._complain(f"{source} belongs above [kafka], or into [database]")
            return
        self._take_property(name, text, source, origin)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Flatten ``sasl.mechanism = ...``, which TOML reads as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _joined(value: object) -> object:
    """A list of servers as one text; anything else as it is."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return value


def _missing(what: str, variable: str, example: str) -> ConfigurationError:
    message = f"nothing says where {what} is."
    hint = f"Run `sideline stack up` for an embedded one, or set {variable}={example}."
    return ConfigurationError(message, hint=hint)


def _guess(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _servers(value: str) -> list[str]:
    return [server.strip() for server in value.split(",")]


def _bootstrap_problem(value: str) -> str | None:
    """Why this is not a list of servers; None: it is."""
    if not value.strip():
        return "is empty; unset it, or write host:port"
    for server in _servers(value):
        if not _is_server(server):
            return f"holds {_safe(server)}, which is not host:port"
    return None


def _is_server(server: str) -> bool:
    found = _HOST.fullmatch(server)
    return found is not None and (not found[3] or 0 < int(found[3][1:]) <= _HIGHEST_PORT)


def _safe(server: str) -> str:
    # Somebody may have put a URL with a password here.
    return "something" if "@" in server else repr(server)


def _database_problem(value: str) -> str | None:
    """Why libpq would not take this; None: it might. Never quotes it."""
    if not value.strip():
        return "is empty; unset it, or write postgresql://user@host/name"
    if "://" not in value:
        rest = _PAIR.sub("", value).strip()
        return 'is neither a postgresql:// URL nor "key=value" pairs' if rest else None
    scheme = value.partition("://")[0]
    if scheme not in {"postgresql", "postgres"}:
        return f"begins with {scheme}://; it must begin with postgresql://"
    return _url_problem(value)


def _url_problem(url: str) -> str | None:
    try:
        hosts = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return "is not a valid URL"
    for host in hosts.split(","):
        decoded = unquote(host)
        # An empty host, or a directory, is libpq's way to a Unix socket.
        if host and not decoded.startswith(("/", ":")) and not _is_server(decoded):
            return "names a host or port that cannot be one; percent-encode a password's @ : / ?"
    return None
