"""What a Publish becomes: a record that carries on what its event came with."""

from __future__ import annotations

import pytest

from sideline.effects import Publish
from sideline.events import Event
from sideline.topics.carrying import headers_of, message_id, record_of

BARE = Event("orders", 2, 17, 1_700_000_000_000, b"k", b"v")


def _event(*headers: tuple[str, bytes | None]) -> Event:
    return Event("orders", 2, 17, 1_700_000_000_000, b"k", b"v", headers)


def test_a_record_has_an_id_that_is_the_same_every_time() -> None:
    """Handled again, an event publishes records with the same ids, each its own (C4)."""
    first = record_of("copy", BARE, 0, Publish("out", b"x"))
    assert first == record_of("copy", BARE, 0, Publish("out", b"x"))
    assert first.headers == (("message-id", b"copy/orders/2/17/0"),)
    assert message_id("copy", BARE.id, 1) != message_id("copy", BARE.id, 0)


def test_correlation_and_trace_go_on() -> None:
    """What follows an event bears its correlation id, its trace and its message id (P2)."""
    event = _event(
        ("correlation-id", b"c"), ("traceparent", b"t"), ("message-id", b"m"), ("secret", b"s")
    )
    assert headers_of("copy", event, 0, None) == (
        ("correlation-id", b"c"),
        ("traceparent", b"t"),
        ("causation-id", b"m"),
        ("message-id", b"copy/orders/2/17/0"),
    )


def test_what_the_handler_says_stands() -> None:
    """A header of the handler's own wins over a carried one; None leaves a carried one out (P2)."""
    event = _event(("correlation-id", b"c"), ("traceparent", b"t"), ("message-id", b"m"))
    own = {"correlation-id": "mine", "traceparent": None, "message-id": b"id", "empty": None}
    assert headers_of("copy", event, 0, own) == (
        ("correlation-id", b"mine"),
        ("message-id", b"id"),
        ("empty", None),
        ("causation-id", b"m"),
    )


def test_of_a_name_that_stands_twice_the_last_is_carried() -> None:
    """Kafka's rule for repeated headers holds; one without a value carries nothing (P2)."""
    event = _event(("correlation-id", b"old"), ("correlation-id", b"new"), ("traceparent", None))
    assert headers_of("copy", event, 0, None)[0] == ("correlation-id", b"new")
    assert "traceparent" not in dict(headers_of("copy", event, 0, None))


def test_text_is_utf_8_and_the_rest_stays() -> None:
    """Key, value, partition and time are those of the handler (P2)."""
    record = record_of("copy", BARE, 0, Publish("out", "Zoë", "k", partition=3, timestamp=5))
    assert (record.key, record.value) == (b"k", "Zoë".encode())
    assert (record.partition, record.timestamp_ms) == (3, 5)
    assert record_of("copy", BARE, 0, Publish("out", None)).value is None


@pytest.mark.parametrize(
    "effect",
    [
        Publish("no topic", b""),
        Publish("", b""),
        Publish(None, b""),  # type: ignore[arg-type]
        Publish("out", {"a": 1}),  # type: ignore[arg-type]
        Publish("out", b"", 7),  # type: ignore[arg-type]
        Publish("out", b"", headers=[("a", b"b")]),  # type: ignore[arg-type]
        Publish("out", b"", headers={1: b"b"}),  # type: ignore[dict-item]
        Publish("out", b"", headers={"a": 1.5}),  # type: ignore[dict-item]
        Publish("out", b"", partition=-1),
        Publish("out", b"", partition=True),
        Publish("out", b"", partition="1"),  # type: ignore[arg-type]
        Publish("out", b"", timestamp=-5),
        Publish("out", b"", timestamp=2**62),
        Publish("out", "\ud800"),
    ],
)
def test_what_is_no_record_is_the_events_failure(effect: Publish) -> None:
    """A Publish of which no record can be made is told in one sentence, never sent (F3)."""
    with pytest.raises((TypeError, ValueError)):
        record_of("copy", BARE, 0, effect)
