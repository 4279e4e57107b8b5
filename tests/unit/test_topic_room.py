"""What a topic takes, as the broker tells it: asked before a slice commits copies for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._acl import AclOperation

from sideline import DeadLetter, Event, Pipeline
from sideline.errors import KafkaUnreachableError, NotFoundError, RefusedError
from sideline.homes.setbacks import Setter
from sideline.slices import Failure, Handled
from sideline.topics import room
from sideline.topics.room import USUAL_BYTES, Rooms
from tests.support.waiting import wait_for

TOPIC = "users.login.dlq"
REFUSED = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
MISSING = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
AWAY = KafkaException(KafkaError(KafkaError._TRANSPORT))
OPEN = SimpleNamespace(
    partitions=[0, 1], authorized_operations=[AclOperation.READ, AclOperation.WRITE]
)


class Clock:
    """A clock that stands still, and tells who looked at it."""

    def __init__(self, now):
        self.now = now
        self.looks = []

    def monotonic(self):
        """Like time's."""
        self.looks.append(self.now)
        return self.now


def future(answer):
    done = Future()
    if isinstance(answer, BaseException):
        done.set_exception(answer)
    else:
        done.set_result(answer)
    return done


def client(topic=OPEN, config=None):
    """An admin client with these answers."""
    config = {"max.message.bytes": SimpleNamespace(value="77")} if config is None else config
    return SimpleNamespace(
        describe_topics=lambda wanted, **_: {TOPIC: future(topic)},
        describe_configs=lambda wanted, **_: {wanted[0]: future(config)},
    )


def rooms_of(topic=OPEN, config=None):
    """Rooms that ask an admin client with these answers."""
    rooms = Rooms({})
    rooms._admin = client(topic, config)
    return rooms


def test_a_topic_that_may_be_written_to():
    """Its own limit counts; one that may not be asked for is the usual one."""
    assert rooms_of().of(TOPIC) == (77, 2)
    assert rooms_of(config=REFUSED).of(TOPIC) == (USUAL_BYTES, 2)
    # Brokers without rules say nothing of rights.
    nobody = SimpleNamespace(partitions=[0], authorized_operations=None)
    assert rooms_of(nobody).of(TOPIC) == (77, 1)


@pytest.mark.parametrize(
    ("topic", "error", "says"),
    [
        (SimpleNamespace(partitions=[0], authorized_operations=[AclOperation.READ]),
         RefusedError, "may not be written to"),
        (REFUSED, RefusedError, "may not be written to"),
        (MISSING, NotFoundError, "does not exist"),
        (AWAY, KafkaUnreachableError, "does not say"),
        (TimeoutError(), KafkaUnreachableError, "does not say"),
    ],
)  # fmt: skip
def test_a_topic_that_takes_nothing_is_said(topic, error, says):
    """Missing, without the right to write, silent: each in its own words, with the topic (F7)."""
    with pytest.raises(error, match=f"{TOPIC}.* {says}" if error is not KafkaUnreachableError
                       else f"{says}.*{TOPIC}"):  # fmt: skip
        rooms_of(topic).of(TOPIC)


def test_what_a_topic_took_is_believed_while_nobody_answers(monkeypatch):
    """Asked for again, in short, by a new client; after a while nothing is known any more (P4)."""
    now = 1_000.0
    asked = []
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    monkeypatch.setattr(room, "AdminClient", lambda _: asked.append(now) or client(AWAY))
    rooms = rooms_of()
    assert rooms.of(TOPIC) == (77, 2)
    rooms._admin = client(AWAY)
    now += room.FRESH_SECONDS
    assert rooms.of(TOPIC) == (77, 2)
    # Nobody waits for an answer once a slice.
    assert rooms.of(TOPIC) == (77, 2)
    assert asked == []
    now += room.FRESH_SECONDS
    assert rooms.of(TOPIC) == (77, 2)
    assert asked == [now]
    now = 1_000.0 + room.KNOWN_SECONDS
    with pytest.raises(KafkaUnreachableError):
        rooms.of(TOPIC)
    rooms._admin = client(MISSING)
    with pytest.raises(NotFoundError):
        rooms.of(TOPIC)


def test_one_thread_asks_for_all(monkeypatch):
    """Handlers side by side: a client that met silence is nobody else's error (F2, P4)."""
    clock = Clock(1_000.0)
    monkeypatch.setattr(room, "time", clock)
    rooms = rooms_of()
    assert rooms.of(TOPIC) == (77, 2)
    silence: Future[object] = Future()
    asked = []

    def describe_topics(wanted, **_):
        asked.append(wanted)
        return {TOPIC: silence}

    rooms._admin = SimpleNamespace(describe_topics=describe_topics)
    clock.now += room.FRESH_SECONDS
    clock.looks.clear()
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(rooms.of, TOPIC) for _ in range(2)]
        wait_for(lambda: len(clock.looks) == 2, what="both threads at the door")
        silence.set_exception(TimeoutError())
        assert [one.result(30) for one in both] == [(77, 2), (77, 2)]
    assert len(asked) == 1


def test_whoever_waited_with_another_in_vain_does_not_wait_again(monkeypatch):
    """Of a topic of which nothing is known: all who asked meanwhile hear of the silence (F2)."""
    clock = Clock(1_000.0)
    monkeypatch.setattr(room, "time", clock)
    silence: Future[object] = Future()
    rooms = Rooms({})
    rooms._admin = SimpleNamespace(describe_topics=lambda *_, **__: {TOPIC: silence})
    monkeypatch.setattr(room, "AdminClient", lambda _: pytest.fail("asked once more"))
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(rooms.of, TOPIC) for _ in range(2)]
        wait_for(lambda: len(clock.looks) == 2, what="both threads at the door")
        clock.now += room.ANSWER_SECONDS
        silence.set_exception(TimeoutError())
        for one in both:
            with pytest.raises(KafkaUnreachableError):
                one.result(30)


def test_what_a_topic_took_is_not_believed_against_the_brokers_word(monkeypatch):
    """One that is gone, or closed to us, is so at once when Kafka says it (F7)."""
    monkeypatch.setattr(room, "FRESH_SECONDS", 0.0)
    rooms = rooms_of()
    assert rooms.of(TOPIC) == (77, 2)
    for answer, error in [(MISSING, NotFoundError), (REFUSED, RefusedError)]:
        rooms._admin = client(answer)
        with pytest.raises(error):
            rooms.of(TOPIC)


def test_an_event_waits_while_its_copy_may_not_be_written():
    """What comes before it is committed, it waits in place, nothing of it is lost (F7)."""
    pipeline = Pipeline("login", topics="users", on_failure=DeadLetter(attempts=1))
    events = [Event("users", 0, number, 0, b"k", b"v") for number in range(3)]
    failed = Failure(events[1], "handler", ValueError("no"))
    handled = Handled(0, 3, events, [(), (), ()], dead={1: failed})
    parking = SimpleNamespace(connection=None, pipeline="login", version="")
    held = SimpleNamespace(guard=None, incarnation=0, tries_of=lambda offset: 0)
    closed = Setter(pipeline, parking, room=rooms_of(REFUSED))
    before, failure = closed.guard(held, handled)
    assert (len(before.events), before.end) == (1, 1)
    assert (failure.stage, failure.event.offset) == ("copy", 1)
    assert "may not be written to" in str(failure.error)
    opened = Setter(pipeline, parking, room=rooms_of(config={}))
    whole, failure = opened.guard(held, handled)
    assert failure is None
    assert whole.dead[1].leaving.record.topic == TOPIC
