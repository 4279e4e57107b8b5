"""Where Kafka and the database are: flag > environment > sideline.toml > a stack that is up.

Read once per command. Everything wrong with the environment and the file is said at once,
and never with a password in it.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sideline import kafka_properties, retention
from sideline.alerts import Alerting
from sideline.durations import seconds
from sideline.errors import ConfigurationError
from sideline.masking import MASK, mask_command, mask_database, mask_webhook
from sideline.retention import Retention

FILE_NAME = "sideline.toml"
STACK_DIRECTORY = ".sideline"

_PREFIX = "SIDELINE_"
_PROPERTY_PREFIX = "SIDELINE_KAFKA__"
_ALERT_PREFIX = "SIDELINE_ALERT_"
_RETENTION_PREFIX = "SIDELINE_RETENTION_"
_FROM_STACK = f"stack in ./{STACK_DIRECTORY}"

# What can be said about alerts, and what it is: names behind SIDELINE_ALERT_ and in [alerts].
ALERTS = {
    "command": "a program that is told of alerts",
    "webhook": "an address on the network that is told of alerts",
    "lag": "how far behind is worth an alert: 5m, or a number of events",
}

# How long what is over is kept, by kind: names behind SIDELINE_RETENTION_ and in [retention].
RETENTION = {
    "events": "resolved and skipped events, and the bytes of discarded ones",
    "operations": "operations and runs that are over",
    "alerts": "alerts that were cleared",
    "audit": "who did what",
}

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

log = logging.getLogger(__name__)
# Bootstrap servers about which this process has warned.
_warned: set[str] = set()


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
    alerting: Alerting = dataclasses.field(default_factory=Alerting)
    """Whom alerts are told; may hold secrets."""
    retention: Retention = dataclasses.field(default_factory=Retention)
    """How long the ledger keeps what is over."""

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

    def database_for(self, sink: object) -> str:
        """Where the ledger of a pipeline with this sink is: in the sink's own database."""
        return getattr(sink, "url", None) or self.require_database()

    def kafka_client(self, **extra: Any) -> dict[str, Any]:  # noqa: ANN401 - librdkafka's values
        """A configuration for a client of confluent-kafka."""
        made = {"bootstrap.servers": self.require_kafka(), **self.kafka_properties, **extra}
        _warn_of_plaintext(made)
        return made

    def shown(self) -> dict[str, str | None]:
        """Every setting as people may see it, secrets masked."""
        database = None if self.database is None else mask_database(self.database)
        shown = {"kafka": self.kafka, "database": database}
        for name, value in sorted(self.kafka_properties.items()):
            shown[f"kafka.{name}"] = MASK if name in kafka_properties.SECRET else value
        shown |= _shown_alerting(self.alerting)
        for name in RETENTION:
            if f"retention.{name}" in self.origins:
                shown[f"retention.{name}"] = retention.shown(getattr(self.retention, name))
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
        draft.values.get("kafka"),
        draft.values.get("database"),
        draft.properties,
        draft.origins(),
        draft.alerting,
        draft.retention,
    )


class _Draft:
    """The settings so far; each source that is read later overrides the ones before."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.properties: dict[str, str] = {}
        self.alerting = Alerting()
        self.retention = Retention()
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
            elif name.removeprefix(_ALERT_PREFIX).lower() in ALERTS:
                about = name.removeprefix(_ALERT_PREFIX).lower()
                self._take_alert(about, environ[name], name, origin)
            elif name.removeprefix(_RETENTION_PREFIX).lower() in RETENTION:
                about = name.removeprefix(_RETENTION_PREFIX).lower()
                self._take_retention(about, environ[name], name, origin)
            elif name not in READ_ELSEWHERE:
                alerts = [_ALERT_PREFIX + about.upper() for about in ALERTS]
                ages = [_RETENTION_PREFIX + about.upper() for about in RETENTION]
                known = ["SIDELINE_KAFKA", "SIDELINE_DATABASE", *alerts, *ages, *READ_ELSEWHERE]
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

    def _take_alert(self, name: str, value: object, source: str, origin: str) -> None:
        try:
            given = _ALERT_READERS[name](value)
        except ValueError as error:
            self._complain(f"{source} {error}")
            return
        self.alerting = dataclasses.replace(self.alerting, **given)
        self._origins[f"alerts.{name}"] = origin

    def _take_retention(self, name: str, value: object, source: str, origin: str) -> None:
        try:
            age = retention.age(value)
        except ValueError as error:
            self._complain(f"{source} {error}")
            return
        self.retention = dataclasses.replace(self.retention, **{name: age})
        self._origins[f"retention.{name}"] = origin

    def _take_leaves(self, table: str, value: object, file: str) -> None:
        known, take = {
            "alerts": (ALERTS, self._take_alert),
            "retention": (RETENTION, self._take_retention),
        }[table]
        if not isinstance(value, dict):
            self._complain(f"{file}: {table} is a table: [{table}]")
            return
        for key, leaf in value.items():
            source = f"{file}: {key!r} in [{table}]"
            if key in known:
                take(key, leaf, source, file)
            else:
                self._complain(f"{source} is not a setting{_guess(key, known)}")

    def _take_table(self, name: str, value: object, file: str) -> None:
        if name in {"alerts", "retention"}:
            self._take_leaves(name, value, file)
            return
        inner = {"kafka": "bootstrap", "database": "url"}.get(name)
        if inner is None:
            guess = _guess(name, ["kafka", "database", "alerts", "retention"])
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


def _warn_of_plaintext(properties: Mapping[str, Any]) -> None:
    """Say once that records, and maybe a password, can be read on their way."""
    protocol = str(properties.get("security.protocol", "plaintext")).lower()
    servers = properties["bootstrap.servers"]
    if not protocol.endswith("plaintext") or servers in _warned or _on_loopback(servers):
        return
    _warned.add(servers)
    what = "records and passwords" if protocol.startswith("sasl") else "records"
    log.warning(
        "Kafka at %s is reached without TLS: %s can be read and changed on their way "
        "(security.protocol is %s; see docs/security.md)",
        *(servers, what, protocol),
    )


def _on_loopback(servers: str) -> bool:
    hosts = [server.rpartition(":")[0] or server for server in _servers(servers)]
    return all(host in {"localhost", "[::1]", "::1"} or host.startswith("127.") for host in hosts)


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


def _read_command(value: object) -> dict[str, Any]:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        words = tuple(value)
    elif isinstance(value, str):
        try:
            words = tuple(shlex.split(value))
        except ValueError:
            raise ValueError("has a quote that is not closed") from None
    else:
        raise ValueError("must be text, or a list of it")
    if not words or not words[0] or any("\0" in word for word in words):
        raise ValueError("names no program; unset it, or write one")
    return {"command": words}


def _read_webhook(value: object) -> dict[str, Any]:
    """An address that may be posted to; never quoted: its path is often a secret."""
    try:
        url = urlsplit(value if isinstance(value, str) else "")
        good = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good or re.search(r"[^!-~]", str(value)):
        raise ValueError("is not an http:// or https:// URL")
    return {"webhook": value}


def _read_lag(value: object) -> dict[str, Any]:
    text = str(value).strip() if isinstance(value, str | int) else ""
    if text.isascii() and text.isdigit():
        return {"lag_events": int(text), "lag_seconds": None}
    try:
        return {"lag_events": None, "lag_seconds": seconds(text)}
    except ConfigurationError:
        message = "is neither a span of time like 5m nor a number of events"
        raise ValueError(message) from None


_ALERT_READERS = {"command": _read_command, "webhook": _read_webhook, "lag": _read_lag}


def _shown_alerting(alerting: Alerting) -> dict[str, str | None]:
    shown: dict[str, str | None] = {}
    if alerting.command:
        shown["alerts.command"] = mask_command(alerting.command)
    if alerting.webhook:
        shown["alerts.webhook"] = mask_webhook(alerting.webhook)
    if alerting.lag_events is not None:
        shown["alerts.lag"] = f"{alerting.lag_events} events"
    elif alerting.lag_seconds is not None:
        shown["alerts.lag"] = f"{alerting.lag_seconds:g}s"
    return shown
