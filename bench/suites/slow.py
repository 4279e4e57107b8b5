"""Handlers that wait 5 ms: how close concurrency comes to the ideal of Little's law.

One partition, so one slot: the ideal is concurrency / 5 ms. A thousand keys leave enough that
can run side by side; with a hot key (one event in a hundred) the others must not become slower.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench import contest, figures
from bench.events import Topic
from bench.peers import PEERS, WAIT_SECONDS, Task
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

KEYS = 1_000
HOT_PER_MILLE = 10
AIMS = {16: 0.92, 64: 0.85}
# With the hot key, of the rate without it.
HOT_AIM = 0.95
KINDS = {"waiting": "async def", "blocking": "def"}


def run(bench: Bench) -> Outcome:
    """Every concurrency, without and with a hot key, in turns."""
    shares: dict[tuple[str, int, bool], list[float]] = {}
    events = bench.settings.slow_events
    even = Topic("slow", events, 1, KEYS)
    hot = Topic("slow-hot", events, 1, KEYS, hot_per_mille=HOT_PER_MILLE)
    with bench.published(even) as without, bench.published(hot) as with_hot:
        for number in range(1, bench.settings.rounds + 1):
            for kind in KINDS:
                for concurrency in AIMS:
                    for topic in (without, with_hot):
                        share = _one(bench, topic, kind, concurrency, number)
                        case = (kind, concurrency, topic is with_hot)
                        shares.setdefault(case, []).append(share)
    rows = [_row(case, values) for case, values in shares.items()]
    title = f"Handlers that wait 5 ms: share of the ideal, {events:,} events, {KEYS:,} keys"
    return Outcome("slow", title, rows, _findings(shares))


def _one(bench: Bench, topic: Topic, kind: str, concurrency: int, number: int) -> float:
    hot = ", hot key" if topic.hot_per_mille else ""
    text = f"{KINDS[kind]}, concurrency {concurrency}{hot}, round {number}"
    with (
        bench.services.fresh_database(USERS) as database,
        bench.narrator.bar(text, topic.events) as done,
    ):
        options = {"pipeline": kind, "concurrency": concurrency}
        task = Task(
            bench.services.bootstrap, database, topic.name, 1, topic.events, options=options
        )
        run = contest.drain(bench.services, PEERS["sideline"], task, done)
    return run.rate / (concurrency / WAIT_SECONDS)


def _row(case: tuple[str, int, bool], shares: list[float]) -> dict[str, Any]:
    kind, concurrency, hot = case
    share = statistics.median(shares)
    return {
        "handler": KINDS[kind],
        "concurrency": concurrency,
        "hot_key": hot,
        "events_per_second": share * concurrency / WAIT_SECONDS,
        "share_of_ideal": share,
        "rounds": shares,
    }


def _findings(shares: dict[tuple[str, int, bool], list[float]]) -> list[Finding]:
    found = []
    for (kind, concurrency, hot), values in shares.items():
        what = f"{KINDS[kind]}, concurrency {concurrency}"
        if hot:
            ratio = figures.ratio_by_round(values, shares[kind, concurrency, False])
            found.append(Finding(f"rate with a hot key, {what}", ratio, HOT_AIM, unit="x"))
        else:
            share = statistics.median(values)
            found.append(Finding(f"share of the ideal, {what}", share, AIMS[concurrency]))
    return found
