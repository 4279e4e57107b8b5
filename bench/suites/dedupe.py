"""What it costs to remember every message: the same stream with and without dedupe=."""

from __future__ import annotations

import statistics
import struct
from typing import Any

import psycopg

from bench import contest, cpu, figures
from bench.contest import Run
from bench.events import RANDOM, REPEATED_KEYS, TIME_ORDERED, Topic
from bench.peers import PEERS, Task
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
AIM = 0.85
WITHOUT, WITH = "users", "deduped"
# What any table of ids needs: a row for each, and an index that refuses a second one.
BARE = "create table bare (id uuid primary key, origin bigint not null)"
SLICE_EVENTS = 25_000
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
    rows += [_bare(bench, ids, text) for ids, text in IDS.items()]
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
    used = statistics.median(run.cpu_per_million.total for run in runs)
    return {
        "what": f"{keys} keys, {ids}, {'with' if name == WITH else 'without'} dedupe",
        "measured": f"{statistics.median(rates):,.0f} events/s, {used:.1f} CPU s/M",
        "against_clean": f"{figures.ratio_by_round(rates, plain):.2f}x",
        "events_per_second": statistics.median(rates),
        "cpu_seconds_per_million": used,
        "rounds": rates,
    }


def _bare(bench: Bench, ids: int, text: str) -> dict[str, Any]:
    """The least that PostgreSQL can be asked for: one connection that stores ids and nothing else.

    By COPY, in their order, a slice a transaction. No sideline, no events.
    """
    topic = Topic("bare", bench.settings.events, 1, 1, ids=ids)
    used = []
    for _ in range(bench.settings.rounds):
        with (
            bench.services.fresh_database(BARE) as database,
            psycopg.connect(database) as connection,
        ):
            backend = connection.info.backend_pid
            before = cpu.seconds(backend)
            for start in range(0, topic.events, SLICE_EVENTS):
                _copy(connection, topic, range(start, min(start + SLICE_EVENTS, topic.events)))
            used.append((cpu.seconds(backend) - before) * 1e6 / topic.events)
    took = statistics.median(used)
    return {
        "what": f"{text} stored by COPY, alone, by one connection",
        "measured": f"{took:.2f} CPU s/M of PostgreSQL",
        "against_clean": "-",
        "cpu_seconds_per_million": took,
        "rounds": used,
    }


def _copy(connection: psycopg.Connection[Any], topic: Topic, some: range) -> None:
    rows = sorted((topic.message_id(number).bytes, number) for number in some)
    body = b"".join(struct.pack("!hi16siq", 2, 16, packed, 8, number) for packed, number in rows)
    with connection.cursor().copy("copy bare from stdin (format binary)") as copy:
        # The signature, no flags, no extension; at the end, no further row.
        copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8) + body + b"\xff\xff")
    connection.commit()
