"""How long an event takes from the time it was due to its committed effect.

The observer asks PostgreSQL about every millisecond for the highest sequence number that is
visible in each partition; events of a partition take effect in order, so everything up to it is
committed. The time is read after the answer: it is never too short, and at most the time of a
question too long, for everybody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from bench import contest, figures
from bench.contest import ROOT, Contestant
from bench.peers import PEERS, Task
from bench.sender import SENDER_VARIABLE, Schedule, send_first
from bench.suites import Bench, Finding, Outcome

EFFECTS = "create table effects (part int, seq bigint, name text, primary key (part, seq))"
VISIBLE = """
select part, (select max(seq) from effects where effects.part = parts.part)
from generate_series(0, %s - 1) as parts (part)
"""
NAMES = ("sideline", "foreachBatch")
# sideline against foreachBatch: the median at most a twentieth, the 99th percentile a fifth.
P50_AIM, P99_AIM = 20.0, 5.0
_LOOK_SECONDS = 0.0007
# After the last event was due; whoever needs longer is not following.
_GRACE_SECONDS = 30.0
_READY_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run."""

    p50: float
    p99: float
    worst: float
    sender_late: float


def run(bench: Bench) -> Outcome:
    """Both followers at every rate on every number of partitions, in turns."""
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    names = [name for name in NAMES if name in (bench.settings.peers or NAMES)]
    for rate in bench.settings.latency_rates:
        for partitions in bench.settings.latency_partitions:
            seen: dict[str, list[Latency]] = {name: [] for name in names}
            for number, order in enumerate(figures.interleave(names, bench.settings.rounds), 1):
                for name in order:
                    text = f"{rate:,}/s, {partitions} partitions, round {number}: {name}"
                    seen[name].append(_one(bench, name, partitions, rate, text))
            rows += [_row(rate, partitions, name, runs) for name, runs in seen.items()]
            findings += _findings(rate, partitions, seen)
    title = "Latency: from the time an event was due to its committed effect"
    return Outcome("latency", title, rows, findings)


def _one(bench: Bench, name: str, partitions: int, rate: int, text: str) -> Latency:
    settings = bench.settings
    events = int(rate * (settings.latency_warm_seconds + settings.latency_seconds))
    with (
        bench.empty_topic("latency", partitions) as topic,
        bench.services.fresh_database(EFFECTS) as database,
        psycopg.connect(database, autocommit=True, prepare_threshold=0) as connection,
        bench.narrator.bar(text, events) as done,
    ):
        options = {"kind": "latency", "pipeline": "latency"}
        task = Task(bench.services.bootstrap, database, topic, partitions, options=options)
        with contest.started(PEERS[name], task) as contestant:
            _wait_until_ready(contestant, connection)
            schedule = Schedule(bench.services.bootstrap, topic, partitions, rate, events, first=1)
            return measure(contestant, connection, schedule, settings.latency_warm_seconds, done)


def measure(
    contestant: Contestant,
    connection: psycopg.Connection[Any],
    schedule: Schedule,
    warm_seconds: float,
    done: Callable[[int], None],
) -> Latency:
    """Send by the schedule and watch the effects; the first seconds do not count."""
    delays: list[float] = []
    upto = [schedule.first - 1] * schedule.partitions
    arrived = 0
    with sending(schedule) as (sender, begin):
        deadline = begin + schedule.events / schedule.rate + _GRACE_SECONDS
        while arrived < schedule.events:
            answer = connection.execute(VISIBLE, (schedule.partitions,)).fetchall()
            now = time.monotonic()
            for part, top in answer:
                for seq in range(upto[part] + 1, top + 1):
                    due = schedule.due(part, seq)
                    if due >= warm_seconds:
                        delays.append(now - begin - due)
                arrived += top - upto[part]
                upto[part] = top
            done(arrived)
            if now > deadline or contestant.process.poll() is not None:
                raise contestant.failed(f"applied only {arrived} of {schedule.events} events")
            time.sleep(_LOOK_SECONDS)
        assert sender.stdout is not None
        late = float(sender.stdout.readline())
    return Latency(
        figures.percentile(delays, 0.5) * 1e3,
        figures.percentile(delays, 0.99) * 1e3,
        max(delays) * 1e3,
        late * 1e3,
    )


@contextlib.contextmanager
def sending(schedule: Schedule) -> Iterator[tuple[subprocess.Popen[str], float]]:
    variables = {
        SENDER_VARIABLE: json.dumps(dataclasses.asdict(schedule)),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "bench.sender"],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    ) as sender:
        assert sender.stdout is not None
        try:
            yield sender, float(sender.stdout.readline())
        except BaseException:
            sender.kill()
            raise


def _wait_until_ready(contestant: Contestant, connection: psycopg.Connection[Any]) -> None:
    """Publish one event to each partition and wait until all of them took effect."""
    task = contestant.task
    send_first(task.bootstrap, task.topic, task.partitions)
    deadline = time.monotonic() + _READY_SECONDS
    while any(top is None for _, top in connection.execute(VISIBLE, (task.partitions,))):
        if time.monotonic() > deadline or contestant.process.poll() is not None:
            raise contestant.failed("did not get ready")
        time.sleep(0.05)


def _row(rate: int, partitions: int, name: str, runs: list[Latency]) -> dict[str, Any]:
    return {
        "rate": rate,
        "partitions": partitions,
        "contestant": name,
        "title": PEERS[name].title,
        "p50_ms": statistics.median(run.p50 for run in runs),
        "p99_ms": statistics.median(run.p99 for run in runs),
        "worst_ms": max(run.worst for run in runs),
        "sender_late_ms": max(run.sender_late for run in runs),
        "rounds": [dataclasses.asdict(run) for run in runs],
    }


def _findings(rate: int, partitions: int, seen: dict[str, list[Latency]]) -> list[Finding]:
    if set(seen) != set(NAMES):
        return []
    ours, theirs = seen["sideline"], seen["foreachBatch"]
    where = f"shorter than foreachBatch, {rate:,}/s, {partitions} partitions"
    p50 = figures.ratio_by_round([run.p50 for run in theirs], [run.p50 for run in ours])
    p99 = figures.ratio_by_round([run.p99 for run in theirs], [run.p99 for run in ours])
    return [
        Finding(f"median latency {where}", p50, P50_AIM, unit="x"),
        Finding(f"p99 latency {where}", p99, P99_AIM, unit="x"),
    ]
