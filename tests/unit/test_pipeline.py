"""What a pipeline's declaration takes, and what it refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from sideline import (
    Block,
    Calls,
    DeadLetter,
    Event,
    NonRecoverable,
    Pipeline,
    Postgres,
    Recoverable,
    RetryTopics,
    Skip,
    Upsert,
)
from sideline.errors import ConfigurationError
from sideline.policies import FloodGuard


def event(value: bytes = b"{}", key: bytes | None = b"k") -> Event:
    return Event("t", 0, 0, 0, key, value)


def test_a_name_and_a_topic_are_enough():
    """Everything else has the default that is right for a consumer that updates data (E1)."""
    pipeline = Pipeline("login", topics="users")

    assert pipeline.topics == ("users",)
    assert (pipeline.delivery, pipeline.start_at) == ("exactly-once", "earliest")
    assert (pipeline.concurrency, pipeline.slice_size, pipeline.fold) == (1, 25_000, True)
    assert isinstance(pipeline.sink, Postgres)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "a b"}, "the name may hold"),
        ({"name": ""}, "the name may hold"),
        ({"name": "x" * 101}, "the name may hold"),
        ({"topics": []}, "no topic is named"),
        ({"topics": "a/b"}, "is not a topic name"),
        ({"topics": ".."}, "is not a topic name"),
        ({"topics": ["a", "a"]}, "named twice"),
        ({"sink": "postgresql://me:hunter2@db/x"}, "the sink is"),
        ({"delivery": "twice"}, "delivery is 'twice'"),
        ({"delivery": "at-most-once"}, "at-most-once cannot keep an event that fails"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": True}, "concurrency is True"),
        ({"slice_size": 1.5}, "slice_size is 1.5"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": "fast"}, "rate is 'fast'"),
        ({"start": "noon"}, "start is 'noon'"),
        ({"start": datetime(2026, 1, 1)}, "without a time zone"),  # noqa: DTZ001 - the point
        ({"start": {0: -1}}, "both are numbers from 0"),
        ({"effects": ["upsert"]}, "which is not an effect"),
        ({"handler_timeout": "soon"}, "is not a span of time"),
        ({"on_failure": DeadLetter(attempts=0)}, "a whole number from 1"),
        ({"on_failure": DeadLetter(dialect="Spring")}, "one of spring, connect, or None"),
        ({"on_failure": RetryTopics(dialect="conect")}, "one of spring, connect, or None"),
        ({"on_failure": DeadLetter(dialect=["spring"])}, "one of spring, connect, or None"),
        ({"on_failure": RetryTopics(delays=())}, "a list of durations"),
        ({"on_failure": RetryTopics(delays="10s")}, "a list of durations"),
        ({"on_failure": RetryTopics(delays=("soon",))}, "not a span of time"),
        ({"on_failure": "retry"}, "is not a policy"),
        ({"on_failure": Skip(alarm="1%")}, "alarm is '1%'; it is a share"),
        ({"on_failure": Skip(alarm=True)}, "alarm is True"),
        ({"on_failure": Skip(alarm=-0.1)}, "alarm is -0.1"),
        ({"on_failure": Skip(alarm=float("nan"))}, "alarm is nan"),
        ({"on_failure": Skip(alarm=5)}, "alarm is 5"),
        ({"guard": 0.5}, "guard is 0.5"),
        ({"guard": FloodGuard(share=0)}, "share is 0"),
        ({"guard": FloodGuard(share="half")}, "share is 'half'"),
        ({"guard": FloodGuard(share=1.5)}, "share is 1.5"),
        ({"guard": FloodGuard(of=0)}, "of is 0; it is a whole number from 1"),
        ({"guard": FloodGuard(of=1e3)}, "of is 1000.0"),
        ({"guard": FloodGuard(in_a_row=True)}, "in_a_row is True"),
        ({"guard": FloodGuard(in_a_row=-1)}, "in_a_row is -1"),
        ({"stash": "nowhere"}, "stash is"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_declared(arguments, words):
    """Not by the first event (F9)."""
    given = {"name": "login", "topics": "users"} | arguments

    with pytest.raises(ConfigurationError, match=words):
        Pipeline(**given)


@pytest.mark.parametrize(
    "options",
    [
        {"start": datetime(2026, 1, 1, tzinfo=UTC)},
        {"start": {0: 5, 1: 0}},
        {"rate": 0.5},
        {"on_failure": Block()},
        {"delivery": "at-most-once", "on_failure": Skip()},
        {"effects": [Upsert, Upsert("users", {"id": 1}, key="id")]},
        {"handler_timeout": "2s"},
        {"on_failure": Skip(alarm=0)},
        {"guard": FloodGuard(share=1, of=1, in_a_row=1)},
    ],
)
def test_what_is_right_is_taken(options):
    """Each documented form."""
    Pipeline("login", topics=["a", "b"], **options)


def test_calls_cannot_promise_exactly_once():
    """What the handler does outside is done at least once, within a bounded time (C2, K12)."""
    pipeline = Pipeline("mails", topics="users", sink=Calls())

    assert pipeline.delivery == "at-least-once"
    assert pipeline.handler_timeout == 30


def test_a_handler_takes_the_event_or_the_transaction_too():
    """One argument or two; the second asks for the open transaction."""
    pipeline = Pipeline("login", topics="users")
    assert not pipeline.has_handler

    pipeline.handler(lambda event: None)
    assert pipeline.has_handler
    assert not pipeline.wants_transaction
    pipeline.handler(lambda event, *, loud=True: None)
    assert not pipeline.wants_transaction
    pipeline.handler(lambda event, tx: None)
    assert pipeline.wants_transaction


@pytest.mark.parametrize("handler", [lambda: None, lambda a, b, c: None], ids=["none", "three"])
def test_a_handler_with_other_arguments_is_refused(handler):
    """With the two ways to write it."""
    with pytest.raises(ConfigurationError, match=r"takes \d arguments") as caught:
        Pipeline("login", topics="users").handler(handler)

    assert "(event, tx)" in caught.value.hint


def test_a_transaction_is_not_shared():
    """Neither concurrency nor async nor another sink goes with the open transaction (K11)."""

    async def wait(event, tx):
        return None

    with pytest.raises(ConfigurationError, match="neither async nor concurrent"):
        Pipeline("login", topics="users").handler(wait)
    with pytest.raises(ConfigurationError, match="neither async nor concurrent"):
        Pipeline("login", topics="users", concurrency=2).handler(lambda event, tx: None)
    with pytest.raises(ConfigurationError, match="only Postgres"):
        Pipeline("mails", topics="users", sink=Calls()).handler(lambda event, tx: None)


def test_setup_and_teardown_are_checked_when_declared():
    """A teardown that could not be called would be noticed at the very end only."""
    pipeline = Pipeline("login", topics="users")
    pipeline.setup(lambda: 1)
    pipeline.teardown(lambda context: None)

    with pytest.raises(ConfigurationError, match="setup takes no arguments"):
        pipeline.setup(lambda context: None)
    with pytest.raises(ConfigurationError, match="teardown takes what setup returned"):
        pipeline.teardown(lambda: None)


def test_whose_fault_an_error_is():
    """The white list decides; in doubt it is the event's own; by hand beats the list (F1)."""
    pipeline = Pipeline(
        "login",
        topics="users",
        recoverable=[BlockingIOError, lambda error: "try again" in str(error)],
    )

    assert pipeline.recovers(Recoverable())
    assert pipeline.recovers(ConnectionResetError())
    assert pipeline.recovers(BlockingIOError())
    assert pipeline.recovers(ValueError("please try again"))
    assert not pipeline.recovers(ValueError())
    assert not pipeline.recovers(NonRecoverable("try again"))


def test_the_key_is_kafka_s_unless_said_otherwise():
    """key= names the aggregate where the Kafka key does not."""
    assert Pipeline("a", topics="t").key_of(event(key=b"7")) == b"7"
    derived = Pipeline("a", topics="t", key=lambda event: event.json()["id"])
    assert derived.key_of(event(b'{"id": 3}')) == b"3"


VERSIONED = """
from sideline import Pipeline
pipeline = Pipeline("a", topics="t")
@pipeline.handler
def handle(event):
    if event.key in {"alpha", "beta", "gamma", "delta"}:
        return [constant for constant in ("a", 1, None)]
print(pipeline.version)
"""


def test_the_same_code_has_the_same_version_in_every_process():
    """Also where its constants are sets, whose order is random: it tells old code from new."""
    versions = {
        subprocess.run(
            [sys.executable, "-c", VERSIONED],
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(4)
    }

    assert len(versions) == 1


def test_other_code_has_another_version():
    """A changed constant or an inner function is other code."""

    def version(handler, **options):
        pipeline = Pipeline("a", topics="t", **options)
        pipeline.handler(handler)
        return pipeline.version

    versions = {
        version(lambda event: 1),
        version(lambda event: 2),
        version(lambda event: [value + 1 for value in (1,)]),
        version(lambda event: [value + 2 for value in (1,)]),
        version(lambda event: 1, key=lambda event: event.key),
    }
    assert len(versions) == 5
    assert version(lambda event: 1) == version(lambda event: 1)


def test_a_sink_s_url_stays_here():
    """It may hold a password: neither repr nor pickle shows it."""
    sink = Postgres("postgresql://me:hunter2@db/shop")

    assert "hunter2" not in repr(sink)
    assert b"hunter2" not in pickle.dumps(sink)
    assert pickle.loads(pickle.dumps(sink)) == Postgres()


def test_a_wrong_sink_is_not_shown_with_its_password():
    """Somebody passes the URL itself: the error must not repeat it."""
    with pytest.raises(ConfigurationError) as caught:
        Pipeline("login", topics="users", sink="postgresql://me:hunter2@db/shop")

    assert "hunter2" not in caught.value.message
