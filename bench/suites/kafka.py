"""From Kafka to Kafka: against a loop written by hand, and what exactly-once costs."""

from __future__ import annotations

import statistics
from typing import Any

from bench import contest, figures
from bench.contest import Run
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, Peer, Task, module
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
LOOP = Peer("copy loop", "a transactional loop by hand, one process", module("copy_loop"))
AIM = 1.2
EXACTLY, AT_LEAST = "exactly-once", "at-least-once"
# Events of a slice; small ones show their price with fewer of them.
SLICES = (100, 1_000, 10_000, 25_000)
MOST_SLICES = 300


def run(bench: Bench) -> Outcome:
    """The whole topic by both, in turns; then slices of every size, with and without."""
    total = bench.settings.events
    runs: dict[str, list[Run]] = {"sideline": [], LOOP.name: []}
    rows: list[dict[str, Any]] = []
    with bench.published(Topic("copied", total, PARTITIONS, REPEATED_KEYS)) as topic:
        for number, order in enumerate(figures.interleave(list(runs), bench.settings.rounds), 1):
            for name in order:
                peer = PEERS["sideline"] if name == "sideline" else LOOP
                runs[name].append(_one(bench, peer, topic, f"{name}, round {number}"))
    ratio = figures.ratio_by_round(
        [one.rate for one in runs["sideline"]], [one.rate for one in runs[LOOP.name]]
    )
    rows += [_row(name, some) for name, some in runs.items()]
    for size in SLICES:
        rows.append(_price(bench, size))
    title = f"Kafka to Kafka: {total:,} events of 200 bytes, {PARTITIONS} partitions"
    return Outcome("kafka", title, rows, [Finding("against a loop by hand", ratio, AIM, unit="x")])


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


def _one(bench: Bench, peer: Peer, topic: Topic, text: str, **options: Any) -> Run:
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
            options={"pipeline": "copied", "to": to, **options},
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
