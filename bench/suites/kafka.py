"""From Kafka to Kafka: against other ways to do it, and what exactly-once costs."""

from __future__ import annotations

import statistics
import uuid
from typing import Any

from bench import contest, figures, optional
from bench.contest import Run
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, SLOTS, Peer, Task, module
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
LOOP = Peer("copy loop", "a transactional loop by hand, one process", module("copy_loop"))
# How many times the rate of each of the others sideline must reach.
AIMS = {
    LOOP.name: ("against a loop by hand", 1.2),
    "Kafka Streams": ("ahead of Kafka Streams", 1.0),
    "Kafka Streams, one thread": ("ahead of Kafka Streams, one thread", 1.0),
    "quixstreams": ("against quixstreams", 4.0),
    "quixstreams, one process": ("against quixstreams, one process", 4.0),
}
# What people get who start them as they come, like the loop: one worker for all partitions.
ALONE = {"Kafka Streams": "Kafka Streams, one thread", "quixstreams": "quixstreams, one process"}
EXACTLY, AT_LEAST = "exactly-once", "at-least-once"
# Events of a slice; small ones show their price with fewer of them.
SLICES = (100, 1_000, 10_000, 25_000)
MOST_SLICES = 300


def run(bench: Bench) -> Outcome:
    """The whole topic by all, in turns; then slices of every size, with and without."""
    total = bench.settings.events
    more = optional.ready(bench.settings.optional, bench.narrator.say, bench.narrator.service)
    peers = {peer.name: (peer, SLOTS) for peer in (PEERS["sideline"], LOOP, *more)}
    peers |= {ALONE[peer.name]: (peer, 1) for peer in more}
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    with bench.published(Topic("copied", total, PARTITIONS, REPEATED_KEYS)) as topic:
        for number, order in enumerate(figures.interleave(list(runs), bench.settings.rounds), 1):
            for name in order:
                peer, slots = peers[name]
                text = f"{name}, round {number}"
                runs[name].append(_one(bench, peer, topic, text, slots=slots))
    rows = [_row(name, some) for name, some in runs.items()]
    rows += [_price(bench, size) for size in SLICES]
    title = f"Kafka to Kafka: {total:,} events of 200 bytes, {PARTITIONS} partitions"
    return Outcome("kafka", title, rows, findings(runs))


def findings(runs: dict[str, list[Run]]) -> list[Finding]:
    """The ratio to each of the others that ran."""
    rates = {name: [one.rate for one in some] for name, some in runs.items()}
    return [
        Finding(what, figures.ratio_by_round(rates["sideline"], rates[name]), aim, unit="x")
        for name, (what, aim) in AIMS.items()
        if name in rates
    ]


def _price(bench: Bench, size: int) -> dict[str, Any]:
    """Slices of one size, in both modes, in turns."""
    count = max(2_000, min(bench.settings.events, size * MOST_SLICES))
    rates: dict[str, list[float]] = {EXACTLY: [], AT_LEAST: []}
    with bench.published(Topic("slices", count, PARTITIONS, REPEATED_KEYS)) as topic:
        for number, order in enumerate(figures.interleave(list(rates), bench.settings.rounds), 1):
            for mode in order:
                text = f"slices of {size:,}, {mode}, round {number}"
                one = _one(bench, PEERS["sideline"], topic, text, delivery=mode, slice_size=size)
                rates[mode].append(one.rate)
    exactly, at_least = (statistics.median(rates[mode]) for mode in (EXACTLY, AT_LEAST))
    return {
        "what": f"slices of {size:,} events, exactly-once",
        "measured": f"{exactly:,.0f} events/s",
        "at_least_once": f"{at_least:,.0f} events/s",
        "price": f"{at_least / exactly - 1:.0%}",
        "rounds": rates,
    }


def _one(
    bench: Bench, peer: Peer, topic: Topic, text: str, *, slots: int = SLOTS, **options: Any
) -> Run:
    with (
        bench.services.fresh_database(USERS) as database,
        bench.empty_topic("copies", PARTITIONS) as to,
        bench.narrator.bar(text, topic.events) as done,
    ):
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            PARTITIONS,
            topic.events,
            slots=slots,
            # A group of its own: it would go on where the one of another round ended.
            options={
                "pipeline": "copied",
                "to": to,
                "group": f"copy-{uuid.uuid4().hex}",
                **options,
            },
        )
        return contest.drain(bench.services, peer, task, done)


def _row(name: str, runs: list[Run]) -> dict[str, Any]:
    rates = [run.rate for run in runs]
    return {
        "what": name,
        "measured": f"{statistics.median(rates):,.0f} events/s",
        "at_least_once": "",
        "price": "",
        "cpu_seconds_per_million": statistics.median(run.cpu_per_million.total for run in runs),
        "rounds": rates,
    }
