"""Handlers that wait 5 ms: how close concurrency comes to the ideal of Little's law.

One partition, so one slot: the ideal is concurrency / 5 ms. A thousand keys leave enough that
can run side by side; with a hot key (one event in a hundred) the others must not become slower.

Nobody reaches the ideal: Python wakes up late, coroutines by up to a millisecond. So the same waits
are measured without sideline too, as many at once, in the same round.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
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
# How often each of the bare ones waits.
BARE_WAITS = 400
BARE_AIM = 0.92


def run(bench: Bench) -> Outcome:
    """Every concurrency, without and with a hot key, in turns."""
    shares: dict[tuple[str, int, bool], list[float]] = {}
    bare: dict[tuple[str, int], list[float]] = {}
    events = bench.settings.slow_events
    even = Topic("slow", events, 1, KEYS)
    hot = Topic("slow-hot", events, 1, KEYS, hot_per_mille=HOT_PER_MILLE)
    with bench.published(even) as without, bench.published(hot) as with_hot:
        for number in range(1, bench.settings.rounds + 1):
            for kind in KINDS:
                for concurrency in AIMS:
                    bare.setdefault((kind, concurrency), []).append(_bare(kind, concurrency))
                    for topic in (without, with_hot):
                        share = _one(bench, topic, kind, concurrency, number)
                        case = (kind, concurrency, topic is with_hot)
                        shares.setdefault(case, []).append(share)
    rows = [_row(case, values, bare) for case, values in shares.items()]
    title = f"Handlers that wait 5 ms: share of the ideal, {events:,} events, {KEYS:,} keys"
    return Outcome("slow", title, rows, _findings(shares, bare))


def _bare(kind: str, concurrency: int) -> float:
    """The share of the ideal that the waits alone reach."""
    started = time.perf_counter()
    if kind == "waiting":
        asyncio.run(_wait_side_by_side(concurrency))
    else:
        threads = [threading.Thread(target=_wait) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return BARE_WAITS * WAIT_SECONDS / (time.perf_counter() - started)


async def _wait_side_by_side(concurrency: int) -> None:
    async def wait() -> None:
        for _ in range(BARE_WAITS):
            await asyncio.sleep(WAIT_SECONDS)

    await asyncio.gather(*[wait() for _ in range(concurrency)])


def _wait() -> None:
    for _ in range(BARE_WAITS):
        time.sleep(WAIT_SECONDS)


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


def _row(
    case: tuple[str, int, bool],
    shares: list[float],
    bare: dict[tuple[str, int], list[float]],
) -> dict[str, Any]:
    kind, concurrency, hot = case
    share = statistics.median(shares)
    return {
        "handler": KINDS[kind],
        "concurrency": concurrency,
        "hot_key": hot,
        "events_per_second": share * concurrency / WAIT_SECONDS,
        "share_of_ideal": share,
        "bare_share": statistics.median(bare[kind, concurrency]),
        "rounds": shares,
    }


def _findings(
    shares: dict[tuple[str, int, bool], list[float]],
    bare: dict[tuple[str, int], list[float]],
) -> list[Finding]:
    found = []
    for (kind, concurrency, hot), values in shares.items():
        what = f"{KINDS[kind]}, concurrency {concurrency}"
        if hot:
            ratio = figures.ratio_by_round(values, shares[kind, concurrency, False])
            found.append(Finding(f"rate with a hot key, {what}", ratio, HOT_AIM, unit="x"))
        else:
            share = statistics.median(values)
            found.append(Finding(f"share of the ideal, {what}", share, AIMS[concurrency]))
            ratio = figures.ratio_by_round(values, bare[kind, concurrency])
            found.append(
                Finding(f"of what the waits alone reach, {what}", ratio, BARE_AIM, unit="x")
            )
    return found
