"""What comes out: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.suites import Finding, Outcome

# Column title, and how a row shows it.
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "throughput": (
        ("partitions", "{partitions}"),
        ("keys", "{keys}"),
        ("contestant", "{title}"),
        ("events/s", "{events_per_second:,.0f}"),
        ("CPU s/M", "{cpu_seconds_per_million[total]:.1f}"),
        ("own", "{cpu_seconds_per_million[contestant]:.1f}"),
        ("PostgreSQL", "{cpu_seconds_per_million[postgres]:.1f}"),
        ("broker", "{cpu_seconds_per_million[broker]:.1f}"),
        ("sideline is", "{sideline_is:.2f}x"),
    ),
    "dataframes": (
        ("keys", "{keys}"),
        ("sink", "{title}"),
        ("events/s", "{events_per_second:,.0f}"),
        ("CPU s/M", "{cpu_seconds_per_million:.1f}"),
    ),
    "prepare": (
        ("keys", "{keys}"),
        ("JSON parsed", "{title}"),
        ("events/s", "{events_per_second:,.0f}"),
        ("CPU s/M", "{cpu_seconds_per_million:.1f}"),
    ),
    "latency": (
        ("events/s", "{rate:,}"),
        ("partitions", "{partitions}"),
        ("contestant", "{title}"),
        ("p50 ms", "{p50_ms:,.1f}"),
        ("p99 ms", "{p99_ms:,.1f}"),
        ("worst ms", "{worst_ms:,.0f}"),
    ),
    "slow": (
        ("handler", "{handler}"),
        ("concurrency", "{concurrency}"),
        ("hot key", "{hot_key}"),
        ("events/s", "{events_per_second:,.0f}"),
        ("of the ideal", "{share_of_ideal:.2f}"),
        ("waits alone", "{bare_share:.2f}"),
    ),
    "memory": (("what", "{what}"), ("MB", "{mb:,.1f}")),
    "idle": (("what", "{what}"), ("% of a core", "{percent:,.2f}")),
    "snapshot": (
        ("snapshot", "{snapshot}"),
        ("slices/s", "{slices_per_second:,.0f}"),
        ("last quarter against first", "{last_against_first:.2f}"),
    ),
    "planning": (("what", "{what}"), ("measured", "{measured}")),
    "failures": (
        ("what", "{what}"),
        ("measured", "{measured}"),
        ("against clean", "{against_clean}"),
    ),
    "copies": (
        ("what", "{what}"),
        ("measured", "{measured}"),
        ("against clean", "{against_clean}"),
    ),
    "replay": (("what", "{what}"), ("measured", "{measured}")),
    "kafka": (
        ("what", "{what}"),
        ("measured", "{measured}"),
        ("at least once", "{at_least_once}"),
        ("price", "{price}"),
    ),
    "publisher": (
        ("who publishes", "{what}"),
        ("records/s", "{records_per_second:,.0f}"),
        ("CPU s/M", "{cpu_seconds_per_million:.2f}"),
        ("Publisher is", "{publisher_is:.2f}x"),
    ),
    "dedupe": (
        ("what", "{what}"),
        ("measured", "{measured}"),
        ("against none", "{against_clean}"),
    ),
}


def show(console: Console, outcomes: list[Outcome]) -> None:
    """Print a table for each suite and one of the aims."""
    for outcome in outcomes:
        table = Table(title=outcome.title, title_justify="left")
        for title, _ in COLUMNS[outcome.suite]:
            table.add_column(title, no_wrap=True)
        for row in outcome.rows:
            table.add_row(*cells(outcome.suite, row))
        console.print(table)
    console.print(aims([finding for outcome in outcomes for finding in outcome.findings]))


def cells(suite: str, row: dict[str, Any]) -> list[str]:
    """The row as text; what it does not have is a dash."""
    return [_cell(pattern, row) for _, pattern in COLUMNS[suite]]


def _cell(pattern: str, row: dict[str, Any]) -> str:
    try:
        return pattern.format(**row)
    except TypeError:
        # A figure that could not be had, such as a ratio to a contestant that did not run.
        return "-"


def aims(findings: list[Finding]) -> Table:
    """Which aims are reached."""
    table = Table(title="Aims", title_justify="left")
    for title in ("figure", "measured", "aim", ""):
        table.add_column(title)
    for finding in findings:
        sign = ">=" if finding.at_least else "<="
        table.add_row(
            finding.what,
            f"{finding.value:.2f}{finding.unit}",
            f"{sign} {finding.aim:g}{finding.unit}",
            "[green]reached[/green]" if finding.holds else "[red]missed[/red]",
        )
    return table


def write(path: Path, machine: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write everything as JSON."""
    document = {"machine": machine, "suites": [_plain(outcome) for outcome in outcomes]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """What `write` wrote."""
    document = json.loads(path.read_text())
    return document["machine"], [_outcome(plain) for plain in document["suites"]]


def _plain(outcome: Outcome) -> dict[str, Any]:
    plain = dataclasses.asdict(outcome)
    for finding, shown in zip(outcome.findings, plain["findings"], strict=True):
        shown["holds"] = finding.holds
    return plain


def _outcome(plain: dict[str, Any]) -> Outcome:
    names = [field.name for field in dataclasses.fields(Finding)]
    findings = [Finding(**{name: f[name] for name in names}) for f in plain["findings"]]
    return Outcome(plain["suite"], plain["title"], plain["rows"], findings)
