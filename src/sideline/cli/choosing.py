"""What `release`, `discard` and `restore` share: options that choose, a plan, and doing it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sideline import settings
from sideline.cli.operations_views import plan_json, plan_lines
from sideline.cli.output import console_err, json_option, print_json
from sideline.cli.watching import watch_operations
from sideline.errors import UsageError
from sideline.masking import mask_database
from sideline.selections import MOST_FIRST, Kind, Plan, PlanName, Selection, check
from sideline.views import EventId, parse_moment

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])

# More on one command line is a list that belongs into a cause or a time.
MOST_NAMED = 10_000
STOP_AT = 0.5


def choices(command: F) -> F:
    """Add the options that choose, and those that say how far to go; see `Asked`."""
    options = (
        click.argument("name", required=False),
        click.option(
            "--key", "keys", metavar="TEXT", multiple=True, help="This key. May be repeated."
        ),
        click.option(
            "--key-hex",
            "hex_keys",
            metavar="HEX",
            multiple=True,
            help="The same, for a key of any bytes.",
        ),
        click.option(
            "--event",
            "events",
            metavar="ID",
            multiple=True,
            help="This event: topic/partition/offset. May be repeated.",
        ),
        click.option(
            "--cause", metavar="CAUSE", help="A cause's fingerprint, its beginning, or a class."
        ),
        click.option("--topic", metavar="TOPIC", help="Only of this topic."),
        click.option("--since", metavar="WHEN", help="A time with its zone, or an age like 2h."),
        click.option("--until", metavar="WHEN", help="The same; what is older."),
        click.option("--all", "everything", is_flag=True, help="All there is."),
        click.option(
            "--first",
            type=click.IntRange(1, MOST_FIRST),
            metavar="N",
            help="So many keys, the oldest; with --dead events.",
        ),
        click.option("--execute", is_flag=True, help="Do it; without it the plan is shown."),
        click.option(
            "--plan", "plan_name", metavar="NAME", help="Only if it is still the set of this plan."
        ),
        click.option(
            "--watch/--no-watch",
            default=None,
            help="Show how it goes until it is over; by default on a terminal.",
        ),
        click.option("--database", metavar="URL", help="PostgreSQL."),
    )
    for option in reversed(options):
        command = option(command)
    return json_option(command)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The options of `choices`, as click gives them."""

    name: str | None
    keys: tuple[str, ...]
    hex_keys: tuple[str, ...]
    events: tuple[str, ...]
    cause: str | None
    topic: str | None
    since: str | None
    until: str | None
    everything: bool
    first: int | None
    execute: bool
    plan_name: str | None
    watch: bool | None
    database: str | None
    as_json: bool

    def selection(self, kind: Kind, **more: Any) -> Selection:  # noqa: ANN401 - fields of it
        """What was chosen; the pipeline is still to be found."""
        now = datetime.now(UTC)
        if max(map(len, (self.keys, self.hex_keys, self.events))) > MOST_NAMED:
            raise UsageError(
                f"more than {MOST_NAMED:,} are named.", hint="Choose by cause or time."
            )
        selection = Selection(
            kind,
            self.name or "",
            keys=tuple(sorted({*map(_text_key, self.keys), *map(_hex_key, self.hex_keys)})),
            events=tuple(dict.fromkeys(map(EventId.parse, self.events))),
            topic=self.topic,
            cause=self.cause,
            since=_moment(self.since, now, "--since"),
            until=_moment(self.until, now, "--until"),
            first=self.first,
            **more,
        )
        if self.plan_name is not None and not self.execute:
            message = "--plan says what to carry out, so it goes with --execute."
            raise UsageError(message, hint="Leave --plan out to see what there is now.")
        return check(selection, everything=self.everything)

    @property
    def wanted(self) -> PlanName | None:
        """The plan that was shown before."""
        return None if self.plan_name is None else PlanName.parse(self.plan_name)


@dataclasses.dataclass(frozen=True, slots=True)
class How:
    """The manner in which a plan is carried out; a release has a choice."""

    rate: float | None = None
    stop_at: float = STOP_AT
    ramp: bool = False
    app: str | None = None

    def words(self, database: str | None) -> list[str]:
        """The same as arguments of the command: whoever types the line gets all of it (R4)."""
        found = ["--ramp"] if self.ramp else []
        found += [] if self.rate is None else ["--rate", _number(self.rate)]
        found += [] if self.stop_at == STOP_AT else ["--stop-at", _number(self.stop_at)]
        found += [] if self.app is None else ["--app", self.app]
        # A password is for its owner to put in; without it the line finds no other database.
        return found + ([] if database is None else ["--database", mask_database(database)])


AT_ONCE = How()


@contextmanager
def planned(
    asked: Asked,
    selection: Selection,
    pipeline: Pipeline | None = None,
) -> Iterator[tuple[Connection, Plan]]:
    """The plan, with the transaction open in which it was made."""
    import psycopg  # noqa: PLC0415

    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.ledger.reading import understood  # noqa: PLC0415

    wanted = asked.wanted
    url = database_of(asked.database, pipeline)
    with understood(url), reach(url, role=selection.kind) as connection:
        # What is shown and what is frozen are of one moment.
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        name = operations.choose_pipeline(
            connection, selection.pipeline or (pipeline.name if pipeline else None), selection.kind
        )
        selection = dataclasses.replace(selection, pipeline=name)
        version = pipeline.version if pipeline else None
        yield connection, operations.plan(connection, selection, name=wanted, version=version)


def carry_out(  # noqa: PLR0913 - what an operation consists of
    asked: Asked,
    connection: Connection,
    shown: Plan,
    how: How = AT_ONCE,
    *,
    reason: str | None,
    pipeline: Pipeline | None = None,
) -> int:
    """Show the plan; with --execute freeze it, and watch. Returns the exit code."""
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.audit import actor  # noqa: PLC0415

    if not asked.as_json:
        words = how.words(asked.database)
        lines = plan_lines(shown, execute=asked.execute, reason=reason, how=words)
        click.echo("\n".join(lines))
    numbers: list[int] = []
    if asked.execute:
        numbers = operations.execute(
            connection,
            shown,
            actor=actor(),
            reason=reason,
            rate=how.rate,
            stop_at=how.stop_at,
            ramp=how.ramp,
            wanted=asked.wanted,
        )
    # What nobody owns is settled at once.
    over = all(operations.find(connection, one).state == "done" for one in numbers)
    connection.close()
    if not numbers:
        if asked.as_json:
            print_json({"plan": plan_json(shown), "executed": asked.execute, "operations": []})
        return 0
    if not asked.as_json:
        _announce(numbers)
    watching = asked.watch if asked.watch is not None else how.ramp or _on_a_terminal(asked.as_json)
    code, ended = 0, None
    if watching:
        code, ended = watch_operations(database_of(asked.database, pipeline), numbers, app=how.app)
    elif over and not asked.as_json:
        console_err.print("It is done.")
    elif not asked.as_json:
        _say_later(shown, numbers, how.app)
    if asked.as_json:
        print_json(
            {
                "plan": plan_json(shown),
                "executed": True,
                "operations": numbers,
                "ended": ended,
            }
        )
    return code


def database_of(database: str | None, pipeline: Pipeline | None) -> str:
    """Where the ledger is: the pipeline may know better than the settings."""
    sink_url: str | None = getattr(pipeline.sink, "url", None) if pipeline is not None else None
    if database is None and sink_url:
        return sink_url
    return settings.load(database=database).require_database()


def finite(_context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse what compares with nothing."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number.", param=option)
    return value


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _announce(numbers: list[int]) -> None:
    if len(numbers) == 1:
        console_err.print(f"Operation {numbers[0]}: asked for.")
        return
    console_err.print(f"Operations {numbers[0]} to {numbers[-1]}: asked for, one after the other.")


def _say_later(shown: Plan, numbers: list[int], app: str | None) -> None:
    if not shown.running:
        console_err.print(nothing_happens(app), markup=False, soft_wrap=True)
    console_err.print(f"How it goes: sideline ops show {numbers[0]} --watch")
    for number in numbers[1:2]:
        console_err.print(f"The next step, when it is done: sideline ops resume {number}")


def nothing_happens(app: str | None) -> str:
    """What to do where no driver stands."""
    target = app or "app:users"
    return (
        "Nothing happens until the pipeline runs: "
        f"`sideline run {target}`, or `sideline run {target} --replay-only`."
    )


def _on_a_terminal(as_json: bool) -> bool:  # noqa: FBT001
    return not as_json and sys.stderr.isatty() and sys.stdout.isatty()


def _text_key(text: str) -> bytes:
    # The shell may have passed bytes that are no text.
    return text.encode("utf-8", "surrogateescape")


def _hex_key(text: str) -> bytes:
    try:
        return bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        message = f"--key-hex is {text!r}, which is not hexadecimal."
        raise UsageError(message, hint="Write two digits a byte, like 00ff.") from None


def _moment(text: str | None, now: datetime, what: str) -> datetime | None:
    return None if text is None else parse_moment(text, now=now, what=what)
