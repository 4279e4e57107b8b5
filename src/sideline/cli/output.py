"""What all commands share when they speak: data on stdout, words on stderr.

Imports rich, so only commands import this module, never `sideline.cli.main`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from sideline import showing

F = TypeVar("F", bound=Callable[..., Any])

# A log that is read later needs no line every tenth of a second.
PLAIN_SECONDS = 2.0
# Before that a rate says more about the clock than about the work.
RATE_SECONDS = 0.5

console_err = Console(stderr=True, highlight=False)
"""Words for people: on stderr, in colour where there is a terminal."""


def json_option(command: F) -> F:
    """Add ``--json``: the command gets ``as_json``; errors become JSON as well."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


def print_json(value: Any) -> None:  # noqa: ANN401 - whatever can be JSON
    """Print JSON on stdout; times, uuids and 64-bit integers come out exactly."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS
    click.echo(showing.json_text(orjson.dumps(value, default=str, option=options).decode()))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str | int | float]]) -> None:
    """Print a table on stdout: for people on a terminal, tab-separated in a pipe.

    Numbers are right-aligned with thousands separated; nothing is cut off in a pipe.
    """
    rows = [tuple(row) for row in rows]
    console = Console(highlight=False)
    if not console.is_terminal:
        for row in (tuple(head), *rows):
            click.echo("\t".join(str(cell) for cell in row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        numbers = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(cell)) for cell in row))
    console.print(table)


class Steps:
    """What a long command is doing: live lines on a terminal, plain lines elsewhere.

    ::

        with Steps() as steps:
            stack.up(progress=steps)            # steps("Kafka", "starting")
            steps.done("Kafka 4.3.1")
            bar = steps.bar("publish", total=20_000)
            bar.advance(500)
            bar.close("20,000 events published")
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console_err if console is None else console
        self._live: Progress | None = None
        self._lines: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._live = Progress(
                SpinnerColumn(style="cyan"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Leave the screen to whoever speaks next."""
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str, text: str) -> None:
        """Say what ``what`` is doing now; the same text twice is said once."""
        if self._said.get(what) == text:
            return
        self._said[what] = text
        if self._live is None:
            self.say(f"{what}: {text}")
        elif what in self._lines:
            self._live.update(self._lines[what], note=text)
        else:
            self._lines[what] = self._live.add_task(what, total=None, note=text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def done(self, text: str, *, of: Iterable[str] = ()) -> None:
        """A line that stays, for something finished; the live lines ``of`` it go."""
        for what in of:
            self._said.pop(what, None)
            line = self._lines.pop(what, None)
            if self._live is not None and line is not None:
                self._live.remove_task(line)
        self._console.print(Text(" ok  ", style="green") + Text(text), soft_wrap=True)

    def bar(self, what: str, total: int) -> Bar:
        """Something that can be counted."""
        return Bar(self, what, total)

    @property
    def live(self) -> Progress | None:
        """Rich's display, where there is a terminal."""
        return self._live


class Bar:
    """Progress towards a number, with the rate; see `Steps.bar`."""

    def __init__(self, steps: Steps, what: str, total: int) -> None:
        self._steps = steps
        self._what = what
        self._total = total
        self._count = self._said = 0
        self._began = self._spoke = time.monotonic()
        self._line: TaskID | None = None
        if steps.live is not None:
            self._line = steps.live.add_task(what, total=total, note="")

    @property
    def rate(self) -> float:
        """Per second, since the counting began: waiting for the first one is not a rate."""
        return self._count / max(time.monotonic() - self._began, 1e-9)

    def advance(self, by: int) -> None:
        """Count some more."""
        self.reach(self._count + by)

    def reach(self, count: int) -> None:
        """Stand at ``count``."""
        if not count:
            self._began = time.monotonic()
        self._count = count
        # More came while it was counted.
        self._total = max(self._total, count)
        note = f"{count:,} / {self._total:,}"
        if time.monotonic() - self._began >= RATE_SECONDS:
            note += f"   {self.rate:,.0f}/s"
        live = self._steps.live
        if live is not None and self._line is not None:
            live.update(self._line, completed=count, total=self._total, note=note)
        elif count > self._said and time.monotonic() - self._spoke >= PLAIN_SECONDS:
            self._spoke, self._said = time.monotonic(), count
            self._steps.say(f"{self._what}: {note}")

    def close(self, text: str | None = None) -> None:
        """Take the bar away; ``text`` stays in its place."""
        live = self._steps.live
        if live is not None and self._line is not None:
            live.remove_task(self._line)
            self._line = None
        if text is not None:
            self._steps.done(text)


def _cell(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.1f}"
