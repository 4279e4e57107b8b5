"""What `Publisher` costs beside a bare producer with the same settings and the same records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from bench import figures
from bench.suites import Bench, Finding, Outcome
from sideline import Publisher
from sideline.message_ids import Ids
from sideline.topics.carrying import CORRELATION_ID, MESSAGE_ID

PARTITIONS = 4
KEYS = 20_000
VALUE = b'{"name": "Zoey"}'.ljust(200)
OURS, BARE, PLAIN = "Publisher", "bare producer, same records", "bare producer, no headers"
AIM = 0.9
# Connections, metadata and the first batches are nobody's merit.
WARM = 1_000


class Measured(NamedTuple):
    """One run."""

    rate: float
    cpu_per_million: float


def run(bench: Bench) -> Outcome:
    """Each in turn, every round."""
    total = bench.settings.events
    keys = [b"user-%d" % (number % KEYS) for number in range(total)]
    runs: dict[str, list[Measured]] = {OURS: [], BARE: [], PLAIN: []}
    # The first run of a process pays for its memory and its code.
    rounds = [list(runs), *figures.interleave(list(runs), max(3, bench.settings.rounds))]
    with bench.narrator.bar("publish", len(rounds) * len(runs) * total) as done:
        count = 0
        for number, order in enumerate(rounds):
            for name in order:
                with bench.empty_topic("published", PARTITIONS) as topic:
                    one = _measure(name, bench.services.bootstrap, topic, keys)
                if number:
                    runs[name].append(one)
                count += total
                done(count)
    ours = [one.rate for one in runs[OURS]]
    rows = [
        {
            "what": name,
            "records_per_second": statistics.median(one.rate for one in some),
            "cpu_seconds_per_million": statistics.median(one.cpu_per_million for one in some),
            "publisher_is": figures.ratio_by_round(ours, [one.rate for one in some]),
            "rounds": [one.rate for one in some],
        }
        for name, some in runs.items()
    ]
    kept = figures.ratio_by_round(ours, [one.rate for one in runs[BARE]])
    findings = [Finding("Publisher against a bare producer", kept, AIM, unit="x")]
    title = f"Publisher: {total:,} records of {len(VALUE)} bytes, {PARTITIONS} partitions"
    return Outcome("publisher", title, rows, findings)


def _measure(name: str, bootstrap: str, topic: str, keys: list[bytes]) -> Measured:
    with Publisher(kafka=bootstrap) as publisher:
        if name == OURS:
            return _timed(lambda some: _publish(publisher, topic, some), keys)
        settings: dict[str, Any] = {**publisher._client, **publisher._options.properties()}  # noqa: SLF001
    send = _Bare(settings, topic, headers=name == BARE)
    return _timed(send, keys)


def _timed(send: Callable[[list[bytes]], None], keys: list[bytes]) -> Measured:
    send(keys[:WARM])
    began, used = time.perf_counter(), time.process_time()
    send(keys)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return Measured(len(keys) / seconds, used / len(keys) * 1e6)


def _publish(publisher: Publisher, topic: str, keys: list[bytes]) -> None:
    publish = publisher.publish
    for key in keys:
        publish(topic, VALUE, key=key)
    publisher.flush()


class _Bare:
    """As confluent-kafka's own guide does it: produce, poll, and a callback that sees failures."""

    def __init__(self, settings: dict[str, Any], topic: str, *, headers: bool) -> None:
        self._producer = Producer(settings)
        self._topic = topic
        self._headers = headers
        self._failed = 0

    def __call__(self, keys: list[bytes]) -> None:
        produce, poll, told, topic = (
            self._producer.produce,
            self._producer.poll,
            self._told,
            self._topic,
        )
        given: dict[str, Any] = {}
        if self._headers:
            # Of the same size; made once, which costs it nothing.
            made = Ids().new()
            given["headers"] = [(MESSAGE_ID, made), (CORRELATION_ID, made)]
        for key in keys:
            while True:
                try:
                    produce(topic, VALUE, key, on_delivery=told, **given)
                except BufferError:
                    poll(0.1)
                else:
                    break
            poll(0)
        self._producer.flush()
        assert not self._failed

    def _told(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed += 1
