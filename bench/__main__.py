"""The command behind `make bench`."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from bench import jars, machine, packages, picture, report, services
from bench.contest import ContestantFailedError
from bench.narration import Narrator
from bench.optional import OPTIONAL
from bench.peers import PEERS
from bench.settings import SUITES, Settings
from bench.suites import Bench, Outcome

RESULTS = Path(__file__).parent / "results"
DEFAULTS = Settings()
# Of the tables in a file or a pipe.
PLAIN_WIDTH = 140


class Listed(click.ParamType[tuple[int | str, ...]]):
    """A comma-separated list, each part of a given kind."""

    name = "list"

    def __init__(self, kind: type[int | str], choices: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.choices = choices

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | str, ...]:
        """Split and check."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        for part in parts:
            if self.choices and part not in self.choices:
                self.fail(f"{part!r} is not one of {', '.join(self.choices)}", param, ctx)
            if self.kind is int and not part.isdigit():
                self.fail(f"{part!r} is not a whole number", param, ctx)
        return tuple(self.kind(part) for part in parts)


@click.command()
@click.option("--events", type=click.IntRange(min=1000), default=DEFAULTS.events)
@click.option("--partitions", type=Listed(int), default=DEFAULTS.partitions)
@click.option("--keys", type=Listed(str, DEFAULTS.keys), default=DEFAULTS.keys)
@click.option("--rounds", type=click.IntRange(min=1), default=DEFAULTS.rounds)
@click.option("--only", type=Listed(str, SUITES), default=SUITES, help="Some of the suites.")
@click.option(
    "--peers",
    type=Listed(str, (*PEERS, *OPTIONAL)),
    default=(),
    help=f"Some contestants; {', '.join(OPTIONAL)}: on top, where the suite kafka runs.",
)
@click.option("--minutes", type=float, default=DEFAULTS.minutes, help="Of load for memory.")
@click.option("--quick", is_flag=True, help="Show in minutes that everything works.")
@click.option("--kafka", envvar="BENCH_KAFKA", help="A broker on this machine; default: our own.")
@click.option("--database", envvar="BENCH_DATABASE", help="A PostgreSQL on this machine.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(kafka: str | None, database: str | None, out: Path, **chosen: Any) -> None:
    """Measure sideline beside other ways to do the same, in one run."""
    # Ended from outside, also in the background, it stops what it started as after Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    settings = settled(**chosen)
    if settings.quick:
        settings = settings.scaled_down()
    narrator = Narrator()
    with services.running(kafka, database, narrator.service) as found:
        jars.fetch(narrator.service)
        packages.fetch(narrator.service)
        described = machine.describe(found)
        narrator.say(" · ".join(f"{k} {v}" for k, v in described.items() if k != "packages"))
        stem = f"{described['at'].replace(':', '')}{'-quick' if settings.quick else ''}"
        bench = Bench(found, settings, narrator)
        outcomes: list[Outcome] = []
        for suite in settings.only:
            outcome = measure(bench, suite)
            if outcome:
                outcomes.append(outcome)
                # Whoever ends it after an hour keeps what was measured.
                described["load_average_after"] = machine.load()
                report.write(out / f"{stem}.json", described, outcomes)
    screen = Console()
    report.show(screen if screen.is_terminal else Console(width=PLAIN_WIDTH), outcomes)
    (out / f"{stem}.svg").write_text(picture.draw(outcomes))
    narrator.say(f"written: {out / stem}.json and .svg")
    raise SystemExit(0 if len(outcomes) == len(settings.only) else 1)


def settled(peers: tuple[str, ...], **chosen: Any) -> Settings:
    """What a command line asks for: some contestants instead of all, optional ones on top."""
    return Settings(
        peers=tuple(name for name in peers if name in PEERS),
        optional=tuple(name for name in OPTIONAL if name in peers),
        **chosen,
    )


def measure(bench: Bench, suite: str) -> Outcome | None:
    """Run one suite; what the others found is not lost when it fails."""
    try:
        outcome: Outcome = importlib.import_module(f"bench.suites.{suite}").run(bench)
    except ContestantFailedError as error:
        bench.narrator.say(f"[red]{suite} failed:[/red] {escape(str(error))}")
        return None
    return outcome


if __name__ == "__main__":
    main()
