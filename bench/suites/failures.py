"""What failures cost: keys that fail, keys that failed long ago, a database that goes away."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench import contest, figures, parked, poison
from bench.contest import Run
from bench.events import REPEATED_KEYS, Topic
from bench.outage import Fragile
from bench.peers import PEERS, Task
from bench.services import USERS, Services
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
CLEAN, ONE, TEN, ASIDE, OUTAGE = "clean", "one", "ten", "aside", "outage"
# The rate with failures, of that without.
AIMS = {ONE: 0.9, TEN: 0.6, ASIDE: 0.9}
# Beyond the outage itself.
OUTAGE_AIM_SECONDS = 5.0
# The outage begins when this share of the events is applied.
_BREAK_AT = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One way to run the same stream."""

    text: str
    services: Services
    fails_per_mille: int = 0
    template: str | None = None
    """A database to begin with."""
    breaks: Callable[[], None] | None = None
    """Makes the database go away, and come back."""


def run(bench: Bench) -> Outcome:
    """The stream in every way, in turns; then slices in this process."""
    away: list[float] = []
    events = bench.settings.events
    with (
        bench.published(Topic("failures", events, PARTITIONS, REPEATED_KEYS)) as topic,
        _cases(bench, topic, away) as cases,
    ):
        runs = _everything(bench, topic, cases)
    costs = [
        cost_seconds(run, clean, seconds)
        for run, clean, seconds in zip(runs[OUTAGE], runs[CLEAN], away, strict=True)
    ]
    rows = [_row(cases[name].text, runs[name], runs[CLEAN]) for name in (CLEAN, *AIMS)]
    rows.append(_outage_row(cases[OUTAGE].text, costs, away))
    findings = [
        Finding(f"throughput kept, {cases[name].text}", _kept(runs, name), aim, unit="x")
        for name, aim in AIMS.items()
    ]
    findings.append(
        Finding(
            f"{cases[OUTAGE].text} costs, beside itself",
            statistics.median(costs),
            OUTAGE_AIM_SECONDS,
            at_least=False,
            unit=" s",
        )
    )
    more, found = poison.measure(bench)
    title = f"Failures: {events:,} events of {REPEATED_KEYS:,} keys, and slices of 25,000"
    return Outcome("failures", title, [*rows, *more], [*findings, *found])


def cost_seconds(run: Run, clean: Run, away_seconds: float) -> float:
    """What an outage took beside itself: beyond the time of as many events without one."""
    return run.seconds - run.events / clean.rate - away_seconds


@contextlib.contextmanager
def _cases(bench: Bench, topic: Topic, away: list[float]) -> Iterator[dict[str, Case]]:
    settings, services = bench.settings, bench.services
    with (
        services.fresh_database(USERS) as template,
        Fragile.started(services) as fragile,
    ):
        text = f"{settings.parked_keys:,} keys aside already"
        with bench.narrator.bar(text, settings.parked_keys):
            parked.fill(services, template, topic, settings.parked_keys)

        def breaks() -> None:
            away.append(fragile.end_for(settings.outage_seconds))

        yield {
            CLEAN: Case("nothing fails", services),
            ONE: Case("1 % of the keys fail", services, 10),
            TEN: Case("10 % of the keys fail", services, 100),
            ASIDE: Case(text, services, template=template),
            OUTAGE: Case(
                f"an outage of {settings.outage_seconds:g} s", fragile.services, breaks=breaks
            ),
        }


def _everything(bench: Bench, topic: Topic, cases: dict[str, Case]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    for number, order in enumerate(figures.interleave(list(cases), bench.settings.rounds), 1):
        for name in order:
            text = f"{cases[name].text}, round {number}"
            runs[name].append(_one(bench, topic, cases[name], text))
    return runs


def _one(bench: Bench, topic: Topic, case: Case, text: str) -> Run:
    tables = () if case.template else (USERS,)
    with (
        case.services.fresh_database(*tables, template=case.template) as database,
        bench.narrator.bar(text, topic.events) as done,
    ):
        task = Task(
            case.services.bootstrap,
            database,
            topic.name,
            PARTITIONS,
            topic.events,
            options={"pipeline": "failing", "fails_per_mille": case.fails_per_mille},
        )
        breaking = iter([case.breaks] if case.breaks else [])

        def progress(total: int) -> None:
            done(total)
            if total >= _BREAK_AT * topic.events and (breaks := next(breaking, None)):
                breaks()

        return contest.drain(case.services, PEERS["sideline"], task, progress)


def _kept(runs: dict[str, list[Run]], name: str) -> float:
    return figures.ratio_by_round([r.rate for r in runs[name]], [r.rate for r in runs[CLEAN]])


def _row(text: str, runs: list[Run], clean: list[Run]) -> dict[str, Any]:
    rates = [run.rate for run in runs]
    rate = statistics.median(rates)
    kept = figures.ratio_by_round(rates, [run.rate for run in clean])
    return {
        "what": text,
        "measured": f"{rate:,.0f} events/s",
        "against_clean": f"{kept:.2f}x",
        "events_per_second": rate,
        "cpu_seconds_per_million": statistics.median(run.cpu_per_million.total for run in runs),
        "rounds": rates,
    }


def _outage_row(text: str, costs: list[float], away: list[float]) -> dict[str, Any]:
    cost = statistics.median(costs)
    return {
        "what": text,
        "measured": f"{cost:.1f} s beside itself",
        "against_clean": "-",
        "cost_seconds": cost,
        "rounds": costs,
        "away_seconds": away,
    }
