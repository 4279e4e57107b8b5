"""Resident memory of the Python workers with events of 10 KB: a backlog, then steady load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psutil

from bench import contest, cpu, figures
from bench.events import Topic
from bench.peers import PEERS, Task
from bench.sender import Schedule, send_first
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome
from bench.suites.latency import sending

SIZE = 10_000
PARTITIONS = 4
STEADY_RATE = 300
LIMIT_MB = 400.0
# Least-squares slope after the first fifth: what is left of it is the allocator's breathing.
GROWTH_MB_PER_MINUTE = 1.0
_LOOK_SECONDS = 0.5
_WARM_SHARE = 0.2
_MB = 1_000_000


def run(bench: Bench) -> Outcome:
    """The highest memory while a backlog is applied, and the growth under steady load."""
    peak = _backlog(bench)
    samples = _steady(bench)
    begin, end = samples[0][0], samples[-1][0]
    steady = [s for s in samples if s[0] >= begin + _WARM_SHARE * (end - begin)]
    slope = figures.growth(steady)
    minutes = (end - begin) / 60
    rows = [
        {"what": "largest worker, backlog", "mb": peak},
        {
            "what": f"largest worker, {minutes:.1f} minutes of load",
            "mb": max(v for _, v in samples),
        },
        {"what": "growth, MB per minute", "mb": slope, "samples": samples},
    ]
    findings = [
        Finding("largest worker, backlog", peak, LIMIT_MB, at_least=False, unit=" MB"),
        Finding(
            f"growth over {minutes:.1f} minutes",
            slope,
            GROWTH_MB_PER_MINUTE,
            at_least=False,
            unit=" MB/min",
        ),
    ]
    return Outcome("memory", "Memory: resident MB of a worker, events of 10 KB", rows, findings)


def largest_worker(pid: int) -> float:
    """Resident megabytes of the largest Python process below a JVM of the tree."""
    sizes = [0.0]
    for process in cpu.tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("java"):
                sizes += [_resident(worker) for worker in process.children(recursive=True)]
    return max(sizes)


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / _MB
    except psutil.NoSuchProcess:
        return 0.0


def _backlog(bench: Bench) -> float:
    peak = 0.0
    topic = Topic("large", bench.settings.large_events, PARTITIONS, 1_000, SIZE)
    with (
        bench.published(topic) as full,
        bench.services.fresh_database(USERS) as database,
        bench.narrator.bar("backlog of 10 KB events", full.events) as done,
    ):
        task = Task(bench.services.bootstrap, database, full.name, PARTITIONS, full.events)
        with contest.started(PEERS["sideline"], task) as contestant:
            for _, total in contestant.commits():
                peak = max(peak, largest_worker(contestant.process.pid))
                done(total)
                if total >= full.events:
                    return peak
    return peak


def _steady(bench: Bench) -> list[tuple[float, float]]:
    count = int(bench.settings.minutes * 60 * STEADY_RATE)
    # The log stays small: what is applied may go.
    limits = {"retention.bytes": "268435456", "segment.bytes": "67108864"}
    with (
        bench.empty_topic("steady", PARTITIONS, **limits) as topic,
        bench.services.fresh_database(USERS) as database,
        bench.narrator.bar(f"steady load, {bench.settings.minutes:g} minutes", count) as done,
    ):
        task = Task(bench.services.bootstrap, database, topic, PARTITIONS)
        schedule = Schedule(task.bootstrap, topic, PARTITIONS, STEADY_RATE, count, SIZE, first=1)
        with contest.started(PEERS["sideline"], task) as contestant:
            send_first(task.bootstrap, topic, PARTITIONS)
            commits = contestant.commits()
            next(commits)
            with sending(schedule):
                return _sample(contestant, commits, count, done)


def _sample(
    contestant: contest.Contestant,
    commits: Iterator[tuple[float, int]],
    count: int,
    done: Callable[[int], None],
) -> list[tuple[float, float]]:
    samples: list[tuple[float, float]] = []
    begun = looked = time.monotonic()
    for at, total in commits:
        if at - looked >= _LOOK_SECONDS:
            looked = at
            samples.append((at - begun, largest_worker(contestant.process.pid)))
            done(total)
        if total >= count:
            break
    return samples
