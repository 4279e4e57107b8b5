"""What it costs to remember every message: the same stream with and without dedupe=."""

from __future__ import annotations

import statistics
from typing import Any

from bench import contest, figures
from bench.contest import Run
from bench.events import RANDOM, REPEATED_KEYS, TIME_ORDERED, Topic
from bench.peers import PEERS, Task
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
AIM = 0.85
WITHOUT, WITH = "users", "deduped"
IDS = {TIME_ORDERED: "ids that grow with time (UUIDv7)", RANDOM: "random ids (UUIDv4)"}


def run(bench: Bench) -> Outcome:
    """No message comes twice: what is left is the price of the check."""
    total = bench.settings.events
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for keys in bench.settings.keys:
        count = REPEATED_KEYS if keys == "repeated" else total
        for ids, text in IDS.items():
            runs: dict[str, list[Run]] = {WITHOUT: [], WITH: []}
            with bench.published(Topic("ids", total, PARTITIONS, count, ids=ids)) as topic:
                for order in figures.interleave([WITHOUT, WITH], bench.settings.rounds):
                    for name in order:
                        runs[name].append(_one(bench, topic, name, f"{name}, {keys}, {text}"))
            plain = [run.rate for run in runs[WITHOUT]]
            kept = figures.ratio_by_round([run.rate for run in runs[WITH]], plain)
            findings.append(
                Finding(f"throughput kept with dedupe, {keys} keys, {text}", kept, AIM, unit="x")
            )
            rows += [_row(keys, text, name, some, plain) for name, some in runs.items()]
    return Outcome("dedupe", f"Duplicate check: {total:,} events, none twice", rows, findings)


def _one(bench: Bench, topic: Topic, name: str, text: str) -> Run:
    with (
        bench.services.fresh_database(USERS) as database,
        bench.narrator.bar(text, topic.events) as done,
    ):
        task = Task(
            bench.services.bootstrap,
            database,
            topic.name,
            PARTITIONS,
            topic.events,
            options={"pipeline": name},
        )
        return contest.drain(bench.services, PEERS["sideline"], task, done)


def _row(keys: str, ids: str, name: str, runs: list[Run], plain: list[float]) -> dict[str, Any]:
    rates = [run.rate for run in runs]
    cpu = statistics.median(run.cpu_per_million.total for run in runs)
    return {
        "what": f"{keys} keys, {ids}, {'with' if name == WITH else 'without'} dedupe",
        "measured": f"{statistics.median(rates):,.0f} events/s, {cpu:.1f} CPU s/M",
        "against_clean": f"{figures.ratio_by_round(rates, plain):.2f}x",
        "events_per_second": statistics.median(rates),
        "cpu_seconds_per_million": cpu,
        "rounds": rates,
    }
