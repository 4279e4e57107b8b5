"""Whose failure an exception is."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import smtplib
import socket
import ssl
import urllib.error
from email.message import Message
from http import HTTPStatus
from types import SimpleNamespace

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException
from psycopg import errors

from sideline import Pipeline
from sideline.classify import Verdict, explain, explain_name, kind_of, sqlstate_kind
from sideline.errors import ConfigurationError, NonRecoverable, ParkedByHand, Recoverable
from sideline.policies import Block, Sideline, Skip
from sideline.whitelist import KNOWN


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("22001", "data"),
        ("22P02", "data"),
        ("23502", "data"),
        ("23505", "data"),
        ("21000", "data"),
        ("P0001", "data"),
        ("44000", "data"),
        ("54000", "data"),
        ("40002", "data"),
        ("08006", "recoverable"),
        ("40001", "recoverable"),
        ("40P01", "recoverable"),
        ("53300", "recoverable"),
        ("55P03", "recoverable"),
        ("57014", "recoverable"),
        ("57P01", "recoverable"),
        ("58030", "recoverable"),
        ("XX000", "recoverable"),
        ("25P03", "recoverable"),
        ("25P04", "recoverable"),
        ("25006", "recoverable"),
        ("42P01", "deployment"),
        ("42501", "deployment"),
        ("3F000", "deployment"),
        ("28P01", "deployment"),
        ("0A000", "deployment"),
        ("99999", "data"),
    ],
)
def test_sqlstate(code, kind):
    """A code decides, and what is not known is the event's own (F1, K10)."""
    assert sqlstate_kind(code) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.UniqueViolation("taken"), "data"),
        (errors.AdminShutdown("restart"), "recoverable"),
        (errors.UndefinedColumn("gone"), "deployment"),
        (psycopg.OperationalError("server closed the connection unexpectedly"), "recoverable"),
        (psycopg.InterfaceError("the connection is closed"), "recoverable"),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), "data"),
        (ConnectionResetError(), "recoverable"),
        (TimeoutError(), "recoverable"),
        (Recoverable("later"), "recoverable"),
        (NonRecoverable("never"), "data"),
        (KeyError("name"), "data"),
        (OSError("disk"), "data"),
    ],
)
def test_exceptions(error, kind):
    """One class can be both: the code decides, not the class alone (F1)."""
    assert kind_of(error) == kind


def foreign(name: str, *bases: type, **body) -> type:
    """A class as a library that is not installed would define it."""
    module, _, short = name.rpartition(".")
    return type(short, bases or (Exception,), {"__module__": module, **body})


def answered(name: str, status: int) -> BaseException:
    """An HTTP client's error with the response that it carries."""

    class Response:
        status_code = status

        def __bool__(self):
            # As in requests: a response that is an error is false.
            return False

    error = foreign(name)()
    error.response = Response()
    return error


REQUEST = foreign("requests.exceptions.RequestException", OSError)
CLIENT = foreign("aiohttp.client_exceptions.ClientError")


@pytest.mark.parametrize(
    "error",
    [
        foreign("requests.exceptions.Timeout", REQUEST)(),
        foreign("requests.exceptions.ConnectionError", REQUEST)(),
        foreign("requests.exceptions.ChunkedEncodingError", REQUEST)(),
        foreign("httpx.TimeoutException")(),
        foreign("httpx._exceptions.ReadTimeout")(),
        foreign("httpx.NetworkError")(),
        foreign("httpx.RemoteProtocolError")(),
        foreign("httpcore.ConnectError")(),
        foreign("urllib3.exceptions.ReadTimeoutError")(),
        foreign("urllib3.exceptions.NewConnectionError")(),
        foreign("urllib3.exceptions.ProtocolError")(),
        foreign("aiohttp.client_exceptions.ClientConnectionError", CLIENT)(),
        foreign("aiohttp.client_exceptions.ClientPayloadError", CLIENT)(),
        foreign("redis.exceptions.ConnectionError")(),
        foreign("redis.exceptions.TimeoutError")(),
        foreign("botocore.exceptions.EndpointConnectionError")(),
        foreign("psycopg2.OperationalError")(),
        foreign("sqlalchemy.exc.TimeoutError")(),
        http.client.IncompleteRead(b""),
        http.client.RemoteDisconnected(),
        smtplib.SMTPServerDisconnected(),
        ssl.SSLEOFError(),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        OSError(errno.ENETUNREACH, "network is unreachable"),
        OSError(errno.EHOSTUNREACH, "no route to host"),
        foreign("app.NoAnswer", foreign("requests.exceptions.Timeout", REQUEST))(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_what_a_connection_suffers_heals(error):
    """Timeouts and lost connections of the usual clients are recoverable, subclasses too (F1)."""
    assert kind_of(error) == "recoverable"
    assert explain(error).rule == "connection"


@pytest.mark.parametrize(
    "error",
    [
        foreign("requests.exceptions.InvalidURL", REQUEST, ValueError)(),
        foreign("requests.exceptions.TooManyRedirects", REQUEST)(),
        foreign("httpx.InvalidURL")(),
        foreign("httpx.DecodingError")(),
        foreign("aiohttp.client_exceptions.InvalidURL", CLIENT)(),
        foreign("urllib3.exceptions.LocationParseError")(),
        foreign("redis.exceptions.ResponseError")(),
        # Only the names are the same.
        foreign("app.errors.ConnectionError")(),
        foreign("__main__.ConnectionError")(),
        foreign("app.requests.Timeout")(),
        foreign(".ConnectionError")(),
        FileNotFoundError(errno.ENOENT, "no such file"),
        OSError(errno.ENOSPC, "no space left"),
        socket.gaierror(socket.EAI_NONAME, "name unknown"),
        ssl.SSLCertVerificationError(),
        http.client.BadStatusLine("nonsense"),
        SystemExit(1),
        KeyboardInterrupt(),
        RecursionError(),
        MemoryError(),
        GeneratorExit(),
        asyncio.CancelledError(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_in_doubt_it_is_the_events_own(error):
    """What is not on the white list is not retried in vain, whatever it derives from (F1, F3)."""
    verdict = explain(error)
    assert (verdict.kind, verdict.rule) == ("data", "default")


@pytest.mark.parametrize("name", ["requests.exceptions.HTTPError", "httpx.HTTPStatusError"])
@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500, 501, 429, 502, 503, 504])
def test_the_status_decides(name, status):
    """429, 502, 503 and 504 heal; a 404 and a 500 do not by themselves (F1)."""
    verdict = explain(answered(name, status))
    heals = status in {429, 502, 503, 504}
    assert verdict.kind == ("recoverable" if heals else "data")
    assert (verdict.rule, verdict.why) == ("status", f"HTTP status {status}")


def test_the_status_is_found_where_each_client_keeps_it():
    """aiohttp and urllib have it on the error, botocore in a dictionary (F1)."""
    aiohttp = foreign("aiohttp.client_exceptions.ClientResponseError", CLIENT)()
    aiohttp.status = 503
    assert kind_of(aiohttp) == "recoverable"

    urllib_says = urllib.error.HTTPError("https://a.example", 502, "bad gateway", Message(), None)
    assert kind_of(urllib_says) == "recoverable"
    urllib_says.code = 404
    urllib_says.close()
    assert kind_of(urllib_says) == "data"

    botocore = foreign("botocore.exceptions.ClientError")()
    botocore.response = {"ResponseMetadata": {"HTTPStatusCode": HTTPStatus.SERVICE_UNAVAILABLE}}
    assert kind_of(botocore) == "recoverable"
    for response in ({}, {"ResponseMetadata": None}, None, 5):
        botocore.response = response
        assert kind_of(botocore) == "data"

    without = foreign("requests.exceptions.HTTPError", REQUEST)("no response at all")
    without.response = None
    assert kind_of(without) == "data"


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (KafkaError(KafkaError._TRANSPORT), "recoverable"),
        (KafkaError(KafkaError._ALL_BROKERS_DOWN), "recoverable"),
        (KafkaError(KafkaError._MSG_TIMED_OUT), "recoverable"),
        (KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), "recoverable"),
        (KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS), "recoverable"),
        (KafkaError(KafkaError.UNKNOWN, "the flag says so", False, True), "recoverable"),
        (KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "data"),
        (KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "data"),
        (KafkaError(KafkaError._TRANSPORT, "but fatal", True), "data"),
        ("only words", "data"),
    ],
    ids=str,
)
def test_kafka_says_whether_it_is_retriable(told, kind):
    """By the client's flag and, where it sets none, by the code (F1)."""
    verdict = explain(KafkaException(told))
    assert (verdict.kind, verdict.rule) == (kind, "kafka")
    assert kind_of(KafkaException()) == "data"


@pytest.mark.parametrize("package", ["kafka", "aiokafka"])
def test_other_kafka_clients_have_the_flag_too(package):
    """It stands on the class (F1)."""
    base = foreign(f"{package}.errors.KafkaError", RuntimeError, retriable=False)
    assert kind_of(base()) == "data"
    healing = foreign(f"{package}.errors.LeaderNotAvailableError", base, retriable=True)
    assert kind_of(healing()) == "recoverable"


@pytest.mark.parametrize(
    ("code", "kind"),
    [("UNAVAILABLE", "recoverable"), ("DEADLINE_EXCEEDED", "recoverable"), ("NOT_FOUND", "data")],
)
def test_grpc_says_it_by_its_code(code, kind):
    """The call's status decides (F1)."""
    base = foreign("grpc.RpcError")
    error = foreign(
        "grpc._channel._InactiveRpcError", base, code=lambda _: SimpleNamespace(name=code)
    )
    assert explain(error()) == Verdict(kind, "grpc", f"gRPC code {code}")
    assert kind_of(base()) == "data"


def test_a_wrapper_is_judged_by_what_it_holds():
    """urllib and SQLAlchemy put the real error into an attribute (F1)."""
    assert kind_of(urllib.error.URLError(ConnectionRefusedError())) == "recoverable"
    assert kind_of(urllib.error.URLError("unknown url type")) == "data"

    wrapped = foreign("sqlalchemy.exc.DBAPIError")
    error = foreign("sqlalchemy.exc.IntegrityError", wrapped)()
    error.orig = errors.UniqueViolation("taken")
    assert kind_of(error) == "data"
    error.orig = errors.AdminShutdown("restart")
    assert kind_of(error) == "recoverable"
    error.orig = errors.UndefinedTable("gone")
    assert kind_of(error) == "deployment"

    psycopg2 = foreign("psycopg2.errors.SerializationFailure", pgcode="40001")
    assert kind_of(psycopg2()) == "recoverable"

    biting = foreign("urllib3.exceptions.MaxRetryError")()
    biting.reason = biting
    assert kind_of(biting) == "data"


def test_what_it_was_raised_from_does_not_count():
    """`raise X from ConnectionError()` is an X: whoever wrote that had decided (F1)."""
    error = ValueError("no price")
    error.__cause__ = error.__context__ = ConnectionResetError()
    assert kind_of(error) == "data"


def test_a_group_waits_only_if_waiting_helps_all():
    """One member that is the event's own makes the group the event's own (F1)."""
    lost, wrong, gone = ConnectionResetError(), ValueError(), errors.UndefinedTable("gone")
    assert kind_of(ExceptionGroup("some", [lost, TimeoutError()])) == "recoverable"
    assert kind_of(ExceptionGroup("some", [lost, ExceptionGroup("more", [wrong])])) == "data"
    assert kind_of(ExceptionGroup("some", [lost, gone])) == "deployment"
    assert kind_of(ExceptionGroup("some", [gone, wrong])) == "data"
    assert explain(ExceptionGroup("some", [wrong]), [ValueError]).kind == "recoverable"
    assert kind_of(ExceptionGroup("some", [Recoverable(), NonRecoverable()])) == "data"


def test_by_hand_then_the_pipeline_then_the_list():
    """Who is nearer to the event decides (F1)."""

    def everything(_error):
        return True

    class Both(Recoverable, NonRecoverable):
        pass

    for error in (NonRecoverable(), Both()):
        assert explain(error, [Exception, everything])[:2] == ("data", "by-hand")
    assert explain(Recoverable())[:2] == ("recoverable", "by-hand")
    assert explain(errors.UndefinedTable("gone"), [psycopg.Error]) == (
        "recoverable",
        "pipeline",
        "recoverable= has psycopg.Error",
    )
    assert explain(errors.UniqueViolation("taken"), [KeyError, everything]).why.endswith(
        "<locals>.everything"
    )
    assert explain(errors.UniqueViolation("taken"), [KeyError])[:2] == ("data", "sqlstate")


def test_a_rule_that_fails_decides_nothing_and_is_told_once(caplog):
    """A predicate that raises breaks no slice; the log says so once, not once an event (F1)."""

    def careless(error):
        return error.response.status_code == 418

    class Meta(type):
        def __subclasscheck__(cls, _other):
            raise RuntimeError("no")

    class StrangeError(Exception, metaclass=Meta):
        pass

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rules = [careless, StrangeError, lambda error: isinstance(error, ValueError)]
            assert explain(ValueError(), rules).rule == "pipeline"
            assert explain(KeyError(), [careless, StrangeError]).rule == "default"
    assert len(caplog.messages) == 2
    assert "careless, which failed: AttributeError: " in caplog.messages[0]

    def exits(_error):
        raise SystemExit(1)

    assert explain(KeyError(), [exits]).kind == "data"


@pytest.mark.parametrize(
    ("cls", "kind", "rule"),
    [
        (errors.UniqueViolation, "data", "sqlstate"),
        (errors.AdminShutdown, "recoverable", "sqlstate"),
        (errors.UndefinedTable, "deployment", "sqlstate"),
        (psycopg.OperationalError, "recoverable", "connection"),
        (ConnectionResetError, "recoverable", "connection"),
        (urllib.error.HTTPError, "data", "status"),
        (KafkaException, "data", "kafka"),
        (Recoverable, "recoverable", "by-hand"),
        (NonRecoverable, "data", "by-hand"),
        (ExceptionGroup, "data", "group"),
        (OSError, "data", "default"),
        (KeyError, "data", "default"),
    ],
)
def test_a_class_is_judged_without_an_exception_of_it(cls, kind, rule):
    """Nothing is instantiated; what only an instance could tell is in doubt (F1)."""
    assert explain(cls)[:2] == (kind, rule)
    assert explain(cls, [lambda error: True])[:2] == (kind, rule)


def test_what_an_exception_would_carry_can_be_said():
    """The code or status of one that is not at hand (F1)."""
    assert explain(psycopg.OperationalError, sqlstate="23505").kind == "data"
    assert explain(urllib.error.HTTPError, status=503).kind == "recoverable"
    assert explain(urllib.error.HTTPError, status=404).kind == "data"


def test_names_of_what_is_not_installed():
    """The white list knows names, so nothing has to be imported to ask it (F1)."""
    assert explain_name("requests.exceptions.ConnectTimeout").kind == "recoverable"
    assert explain_name("requests.ConnectTimeout").kind == "recoverable"
    assert explain_name("requests.exceptions.HTTPError", status=503).kind == "recoverable"
    assert explain_name("requests.exceptions.HTTPError").rule == "status"
    assert explain_name("psycopg2.OperationalError", sqlstate="23505").kind == "data"
    assert explain_name("grpc.RpcError").rule == "grpc"
    for name in ("requests.exceptions.InvalidURL", "requests", "", ".", ".OSError", "OSError"):
        assert explain_name(name) is None
    for name in KNOWN:
        if not name.startswith("."):
            assert explain_name(name) is not None


def test_hostile_exceptions_are_judged_like_others():
    """Whatever an exception's own attributes do, judging it raises nothing (F1)."""

    def refuse(*_arguments):
        raise RuntimeError("no")

    refusing = property(refuse)
    names = ("sqlstate", "pgcode", "response", "status", "code", "retriable", "args", "errno")
    body = dict.fromkeys((*names, "reason", "orig", "__class__"), refusing)
    for known in ("", *KNOWN):
        package, _, short = known.partition(".")
        base = foreign(f"{package or 'builtins'}.{short or 'Any'}")
        assert kind_of(foreign("app.Hostile", base, **body)()) in {"data", "recoverable"}
    unhashable = SimpleNamespace(name=list, retriable=refuse, fatal=refuse)
    assert kind_of(KafkaException(unhashable)) == "data"
    odd = foreign("app.Odd", sqlstate=5, __module__=7)
    assert kind_of(odd()) == "data"
    assert kind_of(foreign("app.Odd", sqlstate="banana")()) == "data"
    assert kind_of(foreign("app.Odd", __getattribute__=refuse)()) == "data"


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (ValueError(), "its own"),
        (errors.UniqueViolation("taken"), "its own"),
        (errors.UndefinedColumn("gone"), "stops"),
        (ConnectionResetError(), "waits"),
        (KeyError(), "waits"),
        (NonRecoverable(), "its own"),
        (ParkedByHand("enough"), "parked"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("policy", "own"), [(Skip(), "skipped"), (Sideline(), "parked"), (Block(), "waits")], ids=repr
)
def test_the_policy_is_for_what_is_the_events_own(error, fate, policy, own):
    """Skipping or parking for a dropped column would leave out everything (F1, F3, F5, F6)."""
    rules = [errors.DiskFull, KeyError]
    pipeline = Pipeline("a", topics="t", on_failure=policy, recoverable=rules)
    assert pipeline.fate(error) == (own if fate == "its own" else fate)


def test_what_is_known_to_be_the_events_own_is_not_judged_again():
    """A 42 or a timeout of one event alone; only what a person said counts more (K10)."""
    pipeline = Pipeline("a", topics="t", recoverable=[errors.QueryCanceled])
    assert pipeline.fate(errors.UndefinedColumn("no such"), own=True) == "parked"
    assert pipeline.fate(errors.DeadlockDetected("again"), own=True) == "parked"
    assert pipeline.fate(errors.QueryCanceled("slow"), own=True) == "waits"


async def later(_error):
    return False


@pytest.mark.parametrize(
    "recoverable",
    [KeyError, 5, [int], ["KeyError"], [(KeyError, ValueError)], pytest.param([later], id="later")],
    ids=str,
)
def test_rules_that_judge_nothing_are_refused_when_declared(recoverable):
    """A rule that never, or always, holds would be noticed in the next outage only (F1)."""
    with pytest.raises(ConfigurationError, match="recoverable"):
        Pipeline("a", topics="t", recoverable=recoverable)
