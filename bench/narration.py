"""What a person sees while the bench runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Narrator:
    """Tells on standard error; standard output is for the tables."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False)

    def service(self, step: str, detail: str) -> None:
        """Progress of the stack's start."""
        self.say(f"[dim]{step}: {detail}[/dim]")

    @contextlib.contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar while the block runs; the function that it gets sets how far it is."""
        if not self.console.is_terminal:
            begun = time.monotonic()
            yield lambda _done: None
            self.say(f"{text} ({time.monotonic() - begun:.0f} s)")
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            line = progress.add_task(text, total=total)
            yield lambda done: progress.update(line, completed=done)
