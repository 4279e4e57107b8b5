"""How fast a backlog is applied, against everyone."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from bench import contest, figures
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, Peer, Task
from bench.peers.batches import batch_events
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

# How many times the rate of each contestant sideline must reach.
AIMS = {"bare": 0.85, "mapInArrow": 1.3, "foreachBatch": 1.5, "foreachPartition": 6.0}


def run(bench: Bench) -> Outcome:
    """Everyone on every kind of topic, in turns."""
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for partitions in bench.settings.partitions:
        for keys in bench.settings.keys:
            count = REPEATED_KEYS if keys == "repeated" else bench.settings.events
            topic = Topic(f"users-{keys}", bench.settings.events, partitions, count)
            with bench.published(topic) as full:
                runs = everyone(bench, full, keys)
            rows += [_row(partitions, keys, name, mine, runs) for name, mine in runs.items()]
            findings += _findings(partitions, keys, runs)
    title = f"Throughput: {bench.settings.events:,} events of 200 bytes into PostgreSQL"
    return Outcome("throughput", title, rows, findings)


def everyone(bench: Bench, topic: Topic, keys: str) -> dict[str, list[contest.Run]]:
    """The runs of each contestant, interleaved."""
    names = list(bench.settings.peers or PEERS)
    runs: dict[str, list[contest.Run]] = {name: [] for name in names}
    for number, order in enumerate(figures.interleave(names, bench.settings.rounds), 1):
        for name in order:
            text = f"{topic.partitions} partitions, {keys} keys, round {number}: {name}"
            runs[name].append(_one(bench, PEERS[name], topic, text))
    return runs


def _one(bench: Bench, peer: Peer, topic: Topic, text: str) -> contest.Run:
    total = int(topic.events * peer.share)
    with bench.services.fresh_database(USERS) as database:
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            topic.partitions,
            events=total,
            options={"batch_events": batch_events(total)},
        )
        with bench.narrator.bar(text, total) as done:
            return contest.drain(bench.services, peer, task, done)


def _row(
    partitions: int, keys: str, name: str, mine: list[contest.Run], runs: dict[str, Any]
) -> dict[str, Any]:
    cpus = [run.cpu_per_million for run in mine]
    return {
        "partitions": partitions,
        "keys": keys,
        "contestant": name,
        "title": PEERS[name].title,
        "events_per_second": statistics.median(run.rate for run in mine),
        "rates": [run.rate for run in mine],
        "cpu_seconds_per_million": {
            "total": statistics.median(cpu.total for cpu in cpus),
            **{
                field.name: statistics.median(getattr(cpu, field.name) for cpu in cpus)
                for field in dataclasses.fields(cpus[0])
            },
        },
        "sideline_is": _ratio(runs, name),
    }


def _ratio(runs: dict[str, list[contest.Run]], name: str) -> float | None:
    if "sideline" not in runs:
        return None
    return figures.ratio_by_round(
        [run.rate for run in runs["sideline"]], [run.rate for run in runs[name]]
    )


def _findings(partitions: int, keys: str, runs: dict[str, list[contest.Run]]) -> list[Finding]:
    found = []
    for name, aim in AIMS.items():
        ratio = _ratio(runs, name) if name in runs else None
        if ratio is not None:
            what = f"throughput against {name}, {partitions} partitions, {keys} keys"
            found.append(Finding(what, ratio, aim, unit="x"))
    return found
