"""Put results into the docs: python -m bench.publish bench/results/<run>.json ...

Of each suite the last file that has it counts; what no file has stays as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from bench import picture, report
from bench.suites import Finding, Outcome

DOCS = Path(__file__).parent.parent / "docs"
# The picture is of these: without all of them it stays.
DRAWN = {"throughput", "latency"}
_HEADING = re.compile(r"^(?=### )", re.MULTILINE)
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def main(paths: list[str]) -> None:
    """Write docs/benchmarks.svg and the figures of docs/benchmarks.md."""
    chosen: dict[str, tuple[dict[str, Any], Outcome]] = {}
    for path in paths:
        machine, outcomes = report.read(Path(path))
        chosen |= {outcome.suite: (machine, outcome) for outcome in outcomes}
    if chosen.keys() >= DRAWN:
        (DOCS / "benchmarks.svg").write_text(picture.draw([o for _, o in chosen.values()]))
    page = DOCS / "benchmarks.md"
    sections = [section(machine, outcome) for machine, outcome in chosen.values()]
    page.write_text(replaced(page.read_text(), sections))


def replaced(page: str, sections: list[str]) -> str:
    """The page with other sections between its markers; those of other suites stay."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    found = {_subject(one): one for one in _HEADING.split(old.strip()) if one.strip()}
    found |= {_subject(one): one for one in sections}
    figures = "\n".join(f"{one.strip()}\n" for one in found.values())
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def _subject(section: str) -> str:
    """What a section is about: its heading without the numbers that it was measured with."""
    return section.partition("\n")[0].partition(":")[0].strip()


def section(machine: dict[str, Any], outcome: Outcome) -> str:
    """A suite as a heading, its tables and where it was measured."""
    titles = [title for title, _ in report.COLUMNS[outcome.suite]]
    parts = [
        f"### {outcome.title}\n",
        _table(titles, [report.cells(outcome.suite, row) for row in outcome.rows]),
        _table(["aim", "measured", "wanted", ""], [_aim(f) for f in outcome.findings]),
        _where(machine),
    ]
    return "\n".join(parts)


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _aim(finding: Finding) -> list[str]:
    sign = "at least" if finding.at_least else "at most"
    return [
        finding.what,
        f"{finding.value:.2f}{finding.unit}",
        f"{sign} {finding.aim:g}{finding.unit}",
        "reached" if finding.holds else "**missed**",
    ]


def _where(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    load, after = machine["load_average"][0], machine["load_average_after"][0]
    return (
        f"{machine['at'][:10]}: {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gb']} GB, {machine['system']}; PostgreSQL "
        f"{machine['postgresql']['server_version']}, Python {machine['python']}, "
        f"{machine['java']}; {packages}; load average {load} before, {after} after.\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
