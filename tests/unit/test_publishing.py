"""What a handler publishes, made into records while it is still its event's turn."""

from __future__ import annotations

import asyncio

import pytest

from sideline import Event, Kafka, NonRecoverable, Pipeline, Publish, Recoverable
from sideline.engine import running
from sideline.errors import ConfigurationError, KafkaUnreachableError, NotFoundError, RefusedError
from sideline.homes.publishing import publishing
from sideline.leaving import Plain, Record
from sideline.testing import event, run_slice


class Rooms:
    """Topics that take 2,000 bytes in two partitions."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def of(self, _topic: str) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        return 2_000, 2


EVENT = Event("orders", 1, 5, 0, b"k", b"v")


def _made(effect: object, rooms: Rooms | None = None, name: str = "copy") -> object:
    pipeline = Pipeline("copy", topics="orders", sink=Kafka())
    pipeline.name = name
    pipeline.handler(lambda event: effect)
    handle = publishing(pipeline, rooms or Rooms())  # type: ignore[arg-type]
    # The second time it is known what the topic takes.
    handle(EVENT)
    return handle(EVENT)


def test_the_quick_way_and_the_long_way_make_the_same_record() -> None:
    """A record does not depend on how often its topic was asked for (P2)."""
    pipeline = Pipeline("copy", topics="orders", sink=Kafka())
    pipeline.handler(lambda event: Publish("out", event.value, event.key))
    handle = publishing(pipeline, Rooms())  # type: ignore[arg-type]
    first, second = handle(EVENT), handle(EVENT)
    assert isinstance(first, Record)
    assert isinstance(second, Plain)
    assert second.record == first


def test_a_run_that_applies_again_repeats_the_ids() -> None:
    """Whoever reads the topic knows a repeated record (R5, C4)."""
    effect = Publish("out", b"v", b"k")
    assert _made(effect, name="copy@7") == _made(effect)


@pytest.mark.parametrize("effect", [None, [], ()])
def test_nothing_to_publish(effect: object) -> None:
    """An event without records is filtered (P2)."""
    assert not _made(effect)


def test_several_records_have_ids_of_their_own() -> None:
    """In the order in which the handler gave them (P2)."""
    made = _made([Publish("out", b"a", b"k"), Publish("out", "b", headers={"x": "y"})])
    ids = [dict(getattr(one, "record", one).headers)["message-id"] for one in made]  # type: ignore[attr-defined]
    assert ids == [b"copy/orders/1/5/0", b"copy/orders/1/5/1"]


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (Publish("out", b"x" * 2_000, b"k"), "too large"),
        (Publish("out", b"x", b"k", headers={"h": b"x" * 2_000}), "too large"),
        (Publish("out", b"x", b"k", partition=2), "has only 2"),
    ],
)
def test_what_its_topic_does_not_take_fails(effect: Publish, words: str) -> None:
    """It is the event's failure, before anything is published (F3)."""
    with pytest.raises(NonRecoverable, match=words):
        _made(effect)


def test_whose_failure_a_topic_is() -> None:
    """One that is not there is the event's; a silent Kafka is waited for (F1)."""
    effect = Publish("out", b"v", b"k")
    with pytest.raises(NonRecoverable, match="does not exist"):
        _made(effect, Rooms(NotFoundError("topic 'out' does not exist")))
    with pytest.raises(Recoverable):
        _made(effect, Rooms(KafkaUnreachableError("silence")))


def test_a_coroutine_publishes_too() -> None:
    """Handlers may be async (P2)."""
    pipeline = Pipeline("copy", topics="orders", sink=Kafka())

    @pipeline.handler
    async def copy(event: Event) -> Publish:
        return Publish("out", event.value, event.key)

    handle = publishing(pipeline, Rooms())  # type: ignore[arg-type]
    assert asyncio.run(handle(EVENT)).value == b"v"


def test_handlers_are_tried_without_kafka() -> None:
    """`run_slice` shows what a handler would publish (P2)."""
    pipeline = Pipeline("copy", topics="orders", sink=Kafka())
    pipeline.handler(lambda event: Publish("out", event.value, event.key))
    found = run_slice(pipeline, [event({"a": 1}, key="k")])
    assert not found.failures


def test_the_sink_is_checked() -> None:
    """A wrong bootstrap is told when the pipeline is declared (P2)."""
    with pytest.raises(ConfigurationError, match="bootstrap"):
        Pipeline("copy", topics="orders", sink=Kafka(9092))  # type: ignore[arg-type]


class OtherCluster:
    def __init__(self, properties: dict[str, str]) -> None:
        self.bootstrap = properties["bootstrap.servers"]

    def id(self) -> str:
        return f"cluster of {self.bootstrap}"


def test_another_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction spans two clusters, so none is begun (P2)."""
    monkeypatch.setattr(running, "Cluster", OtherCluster)
    kafka = {"bootstrap.servers": "here:9092"}
    source = OtherCluster(kafka)
    for sink, refused in ((Kafka(), False), (Kafka("here:9092"), False), (Kafka("b:1"), True)):
        pipeline = Pipeline("copy", topics="orders", sink=sink)
        if refused:
            with pytest.raises(RefusedError, match="another cluster"):
                running._check_sink(pipeline, source, kafka)  # type: ignore[arg-type]
        else:
            running._check_sink(pipeline, source, kafka)  # type: ignore[arg-type]
