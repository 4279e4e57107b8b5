"""JSON parsed by the JVM, in ``prepare=``, beside the default path: so that users can choose."""

from __future__ import annotations

import statistics
from typing import Any

from bench import contest, figures
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, Task
from bench.services import USERS
from bench.suites import Bench, Outcome

WAYS = {"users": "in the handler, as always", "prepared": "by from_json, in prepare="}


def run(bench: Bench) -> Outcome:
    """Both, in turns, on both kinds of topic."""
    rows: list[dict[str, Any]] = []
    partitions = bench.settings.partitions[0]
    for keys in bench.settings.keys:
        count = REPEATED_KEYS if keys == "repeated" else bench.settings.events
        topic = Topic(f"prepare-{keys}", bench.settings.events, partitions, count)
        runs: dict[str, list[contest.Run]] = {way: [] for way in WAYS}
        with bench.published(topic) as full:
            for number, order in enumerate(
                figures.interleave(list(runs), bench.settings.rounds), 1
            ):
                for way in order:
                    text = f"{keys} keys, round {number}: {way}"
                    runs[way].append(_one(bench, way, full, text))
        rows += [
            {
                "keys": keys,
                "title": title,
                "events_per_second": statistics.median(run.rate for run in runs[way]),
                "rates": [run.rate for run in runs[way]],
                "cpu_seconds_per_million": statistics.median(
                    run.cpu_per_million.total for run in runs[way]
                ),
            }
            for way, title in WAYS.items()
        ]
    title = f"A step in the JVM: {bench.settings.events:,} events, {partitions} partitions"
    return Outcome("prepare", title, rows, [])


def _one(bench: Bench, way: str, topic: Topic, text: str) -> contest.Run:
    with bench.services.fresh_database(USERS) as database:
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            topic.partitions,
            events=topic.events,
            options={"pipeline": way},
        )
        with bench.narrator.bar(text, topic.events) as done:
            return contest.drain(bench.services, PEERS["sideline"], task, done)
