"""A query that ends in a pipeline, against the same query with a sink written by hand."""

from __future__ import annotations

import statistics
from typing import Any

from bench import contest, figures
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, Peer, Task, module
from bench.peers.batches import batch_events
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

BY_HAND = PEERS["mapInArrow"]
FED = Peer("foreach_batch", "foreach_batch", module("fed"), needs_packages=True)
# Of the rate of what is written by hand, which keeps neither order nor progress nor failures.
AIM = 0.9


def run(bench: Bench) -> Outcome:
    """Both, in turns, on both kinds of topic."""
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    partitions = bench.settings.partitions[0]
    for keys in bench.settings.keys:
        count = REPEATED_KEYS if keys == "repeated" else bench.settings.events
        topic = Topic(f"frames-{keys}", bench.settings.events, partitions, count)
        runs: dict[str, list[contest.Run]] = {FED.name: [], BY_HAND.name: []}
        with bench.published(topic) as full:
            for number, order in enumerate(
                figures.interleave(list(runs), bench.settings.rounds), 1
            ):
                for name in order:
                    peer = FED if name == FED.name else BY_HAND
                    runs[name].append(
                        _one(bench, peer, full, f"{keys} keys, round {number}: {name}")
                    )
        ratio = figures.ratio_by_round(
            [run.rate for run in runs[FED.name]], [run.rate for run in runs[BY_HAND.name]]
        )
        findings.append(
            Finding(f"foreach_batch against by hand, {keys} keys", ratio, AIM, unit="x")
        )
        rows += [_row(keys, peer, runs[peer.name]) for peer in (FED, BY_HAND)]
    title = f"DataFrames: {bench.settings.events:,} events, {partitions} partitions"
    return Outcome("dataframes", title, rows, findings)


def _row(keys: str, peer: Peer, runs: list[contest.Run]) -> dict[str, Any]:
    return {
        "keys": keys,
        "title": peer.title,
        "events_per_second": statistics.median(run.rate for run in runs),
        "rates": [run.rate for run in runs],
        "cpu_seconds_per_million": statistics.median(run.cpu_per_million.total for run in runs),
    }


def _one(bench: Bench, peer: Peer, topic: Topic, text: str) -> contest.Run:
    with bench.services.fresh_database(USERS) as database:
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            topic.partitions,
            events=topic.events,
            options={"batch_events": batch_events(topic.events)},
        )
        with bench.narrator.bar(text, topic.events) as done:
            return contest.drain(bench.services, peer, task, done)
