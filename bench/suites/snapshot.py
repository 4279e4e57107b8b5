"""Many small slices while another session holds a snapshot.

PostgreSQL keeps every version of a row that an old snapshot could still ask for, and an update by
key walks along them: the progress row of a busy partition would get slower with every slice.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import psycopg

from bench import contest, figures
from bench.events import Topic
from bench.peers import PEERS, Task
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

SLICE_EVENTS = 10
PARTITIONS = 2
# With the snapshot held, of the rate without; and the last quarter of the first.
HELD_AIM = 0.8
LAST_AIM = 0.8


def run(bench: Bench) -> Outcome:
    """The same topic with and without a held snapshot, in turns."""
    runs: dict[str, list[contest.Run]] = {"free": [], "held": []}
    events = bench.settings.small_slices * SLICE_EVENTS
    with bench.published(Topic("small", events, PARTITIONS, events)) as topic:
        for number, order in enumerate(figures.interleave(list(runs), bench.settings.rounds), 1):
            for how in order:
                text = f"slices of {SLICE_EVENTS}, snapshot {how}, round {number}"
                runs[how].append(_one(bench, topic, how, text))
    held = figures.ratio_by_round([r.rate for r in runs["held"]], [r.rate for r in runs["free"]])
    last = statistics.median(last_against_first(run.commits) for run in runs["held"])
    findings = [
        Finding("rate of small slices with a snapshot held", held, HELD_AIM, unit="x"),
        Finding("last quarter against first, snapshot held", last, LAST_AIM, unit="x"),
    ]
    title = f"A held snapshot: {bench.settings.small_slices:,} slices of {SLICE_EVENTS} events"
    return Outcome("snapshot", title, [_row(how, mine) for how, mine in runs.items()], findings)


def last_against_first(commits: list[tuple[float, int]]) -> float:
    """The rate of the last quarter of the events against that of the first."""
    first = [c for c in commits if c[1] <= commits[0][1] + _quarter(commits)]
    last = [c for c in commits if c[1] >= commits[-1][1] - _quarter(commits)]
    return figures.steady_rate(last) / figures.steady_rate(first)


def _quarter(commits: list[tuple[float, int]]) -> float:
    return (commits[-1][1] - commits[0][1]) / 4


def _one(bench: Bench, topic: Topic, how: str, text: str) -> contest.Run:
    with (
        bench.services.fresh_database(USERS) as database,
        _snapshot(database) if how == "held" else contextlib.nullcontext(),
        bench.narrator.bar(text, topic.events) as done,
    ):
        options = {"slice_size": SLICE_EVENTS}
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            PARTITIONS,
            topic.events,
            options=options,
        )
        return contest.drain(bench.services, PEERS["sideline"], task, done)


@contextlib.contextmanager
def _snapshot(database: str) -> Iterator[None]:
    with psycopg.connect(database) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("select 1")
        yield
        connection.rollback()


def _row(how: str, runs: list[contest.Run]) -> dict[str, Any]:
    return {
        "snapshot": how,
        "slices_per_second": statistics.median(run.rate for run in runs) / SLICE_EVENTS,
        "last_against_first": statistics.median(last_against_first(r.commits) for r in runs),
    }
