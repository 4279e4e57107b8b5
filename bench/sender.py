"""An open-loop sender: events at a fixed rate, whatever becomes of them.

A process of its own. Event number i is due at begin + i / rate; when the sender is late it does
not slow down, and latency is counted from the time at which an event was due.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

from confluent_kafka import Producer

from bench.events import EVENT_BYTES

SENDER_VARIABLE = "BENCH_SENDER"
_TICK_SECONDS = 0.001
# Above this many a second real producers gather a few milliseconds; one request for each event
# would measure the broker's request handling.
_GATHER_ABOVE = 1_000
_GATHER_MS = 5
# As many as Java's producer sends before the first is answered. librdkafka's default has no end:
# requests of one event each then queue up in a busy broker, and that queue would be measured
# instead of whoever follows.
_REQUESTS_UNDER_WAY = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Which events are due when: event i goes to partition i % partitions."""

    bootstrap: str
    topic: str
    partitions: int
    rate: float
    events: int
    size: int = EVENT_BYTES
    # Sequence numbers begin here in every partition.
    first: int = 0

    def due(self, part: int, seq: int) -> float:
        """Seconds after the begin at which an event is due."""
        return ((seq - self.first) * self.partitions + part) / self.rate

    def place(self, index: int) -> tuple[int, int]:
        """Partition and sequence number of the event at ``index``."""
        return index % self.partitions, self.first + index // self.partitions


def body(part: int, seq: int, size: int) -> bytes:
    """One event that serves both kinds of pipelines: one row an event, or one a user."""
    start = (
        f'{{"part":{part},"seq":{seq},"name":"Zoey {seq}","id":"user-{part}-{seq % 1000}",'
        '"email":"","about":"'
    )
    return (start + "z" * (size - len(start) - 2) + '"}').encode()


def send_first(bootstrap: str, topic: str, partitions: int) -> None:
    """Event 0 of every partition: what shows that a contestant is ready."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for part in range(partitions):
        producer.produce(topic, value=body(part, 0, EVENT_BYTES), key=f"{part}-0", partition=part)
    producer.flush(30)


def main() -> None:
    """Say when it begins (monotonic seconds), send everything, say how late it ever was."""
    schedule = Schedule(**json.loads(os.environ[SENDER_VARIABLE]))
    gather = _GATHER_MS if schedule.rate > _GATHER_ABOVE else 0
    producer = Producer(
        {
            "bootstrap.servers": schedule.bootstrap,
            "linger.ms": gather,
            "max.in.flight.requests.per.connection": _REQUESTS_UNDER_WAY,
        }
    )
    producer.list_topics(schedule.topic, timeout=10)
    begin = time.monotonic() + 0.2
    sys.stdout.write(f"{begin:.6f}\n")
    sys.stdout.flush()
    latest = send(producer, schedule, begin)
    producer.flush(30)
    sys.stdout.write(f"{latest:.6f}\n")


def send(producer: Producer, schedule: Schedule, begin: float) -> float:
    """Send each event as soon as it is due; return the greatest delay."""
    latest = 0.0
    index = 0
    while index < schedule.events:
        due = begin + index / schedule.rate
        now = time.monotonic()
        if now < due:
            producer.poll(0)
            time.sleep(min(due - now, _TICK_SECONDS))
            continue
        latest = max(latest, now - due)
        part, seq = schedule.place(index)
        value = body(part, seq, schedule.size)
        producer.produce(schedule.topic, value=value, key=f"{part}-{seq}", partition=part)
        index += 1
    return latest


if __name__ == "__main__":
    main()
