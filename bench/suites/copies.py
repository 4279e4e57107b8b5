"""What copies cost: one event of a hundred through a retry topic, and dead letters alone."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from bench import contest, events, figures
from bench.contest import Run
from bench.events import REPEATED_KEYS, Topic
from bench.peers import PEERS, Task
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
RETRIES = 3
CLEAN, RETRY, DEAD = "clean", "retry", "dead"
TEXTS = {
    CLEAN: "nothing fails",
    RETRY: "1 % of the events through a retry topic",
    DEAD: "every event a dead letter",
}
RETRY_AIM = 0.85
DEAD_AIM = 20_000.0
# Each costs ten times as much as one that is applied.
DEAD_SHARE = 0.2
# Producers, transactions and the broker's own code are new to each other at first: with a stream of
# two seconds that would be most of the difference.
LONGER = 4


def run(bench: Bench) -> Outcome:
    """The same stream without failures and with some, by both sets of keys; then nothing else."""
    total = bench.settings.events * LONGER
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for keys in bench.settings.keys:
        count = REPEATED_KEYS if keys == "repeated" else total
        topic = Topic("copies", total, PARTITIONS, count)
        runs = _turns(bench, topic, (CLEAN, RETRY))
        clean = [run.rate for run in runs[CLEAN]]
        kept = figures.ratio_by_round([run.rate for run in runs[RETRY]], clean)
        text = f"throughput kept, {keys} keys, {TEXTS[RETRY]}"
        findings.append(Finding(text, kept, RETRY_AIM, unit="x"))
        rows += [_row(f"{keys} keys, {TEXTS[name]}", some, clean) for name, some in runs.items()]
    fewer = max(1_000, int(bench.settings.events * DEAD_SHARE))
    letters = _turns(bench, Topic("letters", fewer, PARTITIONS, REPEATED_KEYS), (DEAD,))[DEAD]
    rate = statistics.median(run.rate for run in letters)
    findings.append(Finding("dead letters, events/s", rate, DEAD_AIM))
    rows.append(_row(TEXTS[DEAD], letters))
    return Outcome("copies", f"Copies: {total:,} events", rows, findings)


def _turns(bench: Bench, topic: Topic, names: tuple[str, ...]) -> dict[str, list[Run]]:
    """Runs of one topic's events, in turns."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with bench.published(topic) as there:
        for number, order in enumerate(figures.interleave(list(names), bench.settings.rounds), 1):
            for name in order:
                runs[name].append(_one(bench, there, name, f"{TEXTS[name]}, round {number}"))
    return runs


def _one(bench: Bench, topic: Topic, name: str, text: str) -> Run:
    with (
        bench.services.fresh_database(USERS) as database,
        _own_topics(bench.services.bootstrap, topic.name),
        bench.narrator.bar(text, topic.events) as done,
        tempfile.NamedTemporaryFile(prefix="sideline-bench-") as marks,
    ):
        # So many events of each partition may fail once.
        marks.truncate(PARTITIONS * (topic.events // 100 + 1))
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            PARTITIONS,
            topic.events,
            options={
                "pipeline": "letters" if name == DEAD else "retried",
                "case": name,
                "marks": marks.name,
            },
        )
        return contest.drain(bench.services, PEERS["sideline"], task, done)


@contextlib.contextmanager
def _own_topics(bootstrap: str, topic: str) -> Iterator[None]:
    retries = [f"{topic}.bench.retry.{number}" for number in range(1, RETRIES + 1)]
    letters = f"{topic}.bench.dlq"
    for name in retries:
        config = {"message.timestamp.type": "LogAppendTime"}
        events.create_topic(bootstrap, name, PARTITIONS, **config)
    events.create_topic(bootstrap, letters, PARTITIONS)
    try:
        yield
    finally:
        for name in (*retries, letters):
            events.delete_topic(bootstrap, name)


def _row(text: str, runs: list[Run], clean: list[float] | None = None) -> dict[str, Any]:
    rates = [run.rate for run in runs]
    return {
        "what": text,
        "measured": f"{statistics.median(rates):,.0f} events/s",
        "against_clean": "-" if clean is None else f"{figures.ratio_by_round(rates, clean):.2f}x",
        "events_per_second": statistics.median(rates),
        "cpu_seconds_per_million": statistics.median(run.cpu_per_million.total for run in runs),
        "rounds": rates,
    }
