"""`sideline parked`: the keys, causes and events that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from sideline import settings, showing
from sideline.cli.exporting import write, written
from sideline.cli.fetching import fetcher
from sideline.cli.importing import import_
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.cli.parked_views import (
    MESSAGE_CHARACTERS,
    cause_json,
    cause_lines,
    event_json,
    event_lines,
    key_cell,
    key_json,
    shown_json,
    why_cell,
)
from sideline.errors import UsageError
from sideline.views import EventId, Wanted, parse_moment

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

F = TypeVar("F", bound=Callable[..., Any])

VALUE_BYTES = 2_000


@click.group(no_args_is_help=True)
def parked() -> None:
    """What waits, and why: keys that stepped aside, causes, events."""


parked.add_command(import_)


def filters(command: F) -> F:
    """Add the options that say what is asked for; see `_asked`."""
    options = (
        click.argument("name", required=False),
        click.option("--topic", metavar="TOPIC", help="Only of this topic."),
        click.option("--key", metavar="TEXT", help="Only of this key."),
        click.option("--key-hex", metavar="HEX", help="The same, for a key of any bytes."),
        click.option("--cause", metavar="CAUSE", help="A cause's fingerprint, or an error class."),
        click.option("--since", metavar="WHEN", help="A time with its zone, or an age like 2h."),
        click.option("--until", metavar="WHEN", help="The same; what is older."),
        click.option("--database", metavar="URL", help="PostgreSQL."),
    )
    for option in reversed(options):
        command = option(command)
    return command


dead_option = click.option(
    "--dead", is_flag=True, help="Dead events, imported ones among them, not parked ones."
)


def pages(command: F) -> F:
    """Add the options of a list that comes in pages."""
    limit = click.option(
        "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Lines."
    )
    after = click.option("--after", metavar="TOKEN", help="Where the page before ended.")
    return limit(after(command))


@parked.command()
@filters
@pages
@json_option
def keys(*, limit: int, after: str | None, as_json: bool, **asked: Any) -> None:  # noqa: ANN401 - options
    """List the keys that are aside, oldest first."""
    from sideline.parked import keys as read  # noqa: PLC0415 - imports psycopg

    with _opened(asked) as (connection, wanted):
        page = read(connection, wanted, limit=limit, after=after)
        _sum_up(connection, wanted)
    if as_json:
        print_json({"keys": [key_json(row) for row in page.rows], "next": page.after})
        return
    head, rows = _named(
        wanted,
        ("key", "topic", "events", "since", "cause"),
        [
            (
                row.pipeline,
                key_cell(row.key),
                row.topic,
                row.events,
                showing.moment(row.since),
                why_cell(row),
            )
            for row in page.rows
        ],
    )
    _print_page(head, rows, page.after)


@parked.command()
@filters
@pages
@json_option
def causes(*, limit: int, after: str | None, as_json: bool, **asked: Any) -> None:  # noqa: ANN401 - options
    """List why events failed, the cause that was seen first at the head."""
    from sideline.parked import causes as read  # noqa: PLC0415 - imports psycopg

    with _opened(asked) as (connection, wanted):
        page = read(connection, wanted, limit=limit, after=after)
    if as_json:
        print_json({"causes": [cause_json(row) for row in page.rows], "next": page.after})
        return
    if page.rows and Console().is_terminal:
        for row in page.rows:
            click.echo("\n".join(cause_lines(row, name=wanted.name is None)))
        _next(page.after)
        return
    head, rows = _named(
        wanted,
        (
            *("cause", "parked", "share", "skipped", "error", "place", "message"),
            *("first seen", "last seen", "example"),
        ),
        [
            (
                row.pipeline,
                row.fingerprint,
                row.parked,
                f"{row.share:.0%}",
                row.skipped,
                showing.words(row.error),
                showing.words(row.place),
                showing.short(row.message, MESSAGE_CHARACTERS),
                showing.moment(row.first_at),
                showing.moment(row.last_at),
                str(row.example),
            )
            for row in page.rows
        ],
    )
    _print_page(head, rows, page.after)


@parked.command("list")
@filters
@dead_option
@pages
@json_option
def list_(*, limit: int, after: str | None, as_json: bool, **asked: Any) -> None:  # noqa: ANN401 - options
    """List parked events, oldest first; of a key, its whole queue in the order of replay.

    With --dead those that ended in the dead-letter topic, or were imported.
    """
    from sideline.parked import events as read  # noqa: PLC0415 - imports psycopg

    with _opened(asked) as (connection, wanted):
        page = read(connection, wanted, limit=limit, after=after)
        if not wanted.dead:
            _sum_up(connection, wanted)
    if as_json:
        print_json({"events": [event_json(row) for row in page.rows], "next": page.after})
        return
    head, rows = _named(
        wanted,
        ("id", "key", "parked", "cause"),
        [
            (
                row.pipeline,
                str(row.id),
                key_cell(row.key),
                showing.moment(row.parked_at),
                why_cell(row),
            )
            for row in page.rows
        ],
    )
    _print_page(head, rows, page.after, what="dead" if wanted.dead else "parked")


@parked.command()
@click.argument("event", metavar="ID")
@click.argument("name", required=False)
@click.option("--full", is_flag=True, help="The whole value, however long it is.")
@click.option(
    "--incarnation",
    type=click.IntRange(-1),
    help="Of a topic that was made again: which one; -1: imported.",
)
@click.option("--kafka", metavar="HOST:PORT", help="Where bytes are that the ledger has not.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def show(  # noqa: PLR0913 - one parameter an option
    *,
    event: str,
    name: str | None,
    full: bool,
    incarnation: int | None,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Show everything about an event; ID is topic/partition/offset."""
    from sideline.ledger.reading import opened  # noqa: PLC0415 - imports psycopg
    from sideline.parked import show as read  # noqa: PLC0415

    wanted = EventId.parse(event)
    with opened(settings.load(database=database).require_database(), role="parked") as connection:
        found = read(
            connection,
            wanted,
            name=name,
            incarnation=incarnation,
            value_bytes=None if full or as_json else VALUE_BYTES,
            fetch=fetcher(connection, kafka),
        )
    if as_json:
        print_json(shown_json(found))
    else:
        click.echo("\n".join(event_lines(found)))


@parked.command()
@filters
@dead_option
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="A file instead of stdout."
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--kafka", metavar="HOST:PORT", help="Where bytes are that the ledger has not.")
@json_option
def export(
    *,
    out: Path | None,
    force: bool,
    kafka: str | None,
    as_json: bool,
    **asked: Any,  # noqa: ANN401 - one an option
) -> None:
    """Write parked events, or dead ones, as JSON lines that can be published again."""
    from sideline.parked import count_hint  # noqa: PLC0415 - imports psycopg
    from sideline.parked import export as read  # noqa: PLC0415

    with _opened(asked) as (connection, wanted), written(out, force=force) as file:
        batches = read(connection, wanted, fetcher(connection, kafka))
        count = write(batches, file, total=count_hint(connection, wanted))
    if as_json and out is not None:
        # On stdout there are only the events: they are JSON already.
        print_json({"events": count, "file": str(out)})
        return
    where = f" to {out}" if out is not None else ""
    console_err.print(f"{count:,} events exported{where}.", markup=False, soft_wrap=True)


# What is asked for


@contextmanager
def _opened(asked: dict[str, Any]) -> Iterator[tuple[Connection, Wanted]]:
    from sideline.ledger.reading import opened  # noqa: PLC0415 - imports psycopg

    wanted = _asked(**{name: value for name, value in asked.items() if name != "database"})
    url = settings.load(database=asked["database"]).require_database()
    with opened(url, role="parked") as connection:
        yield connection, wanted


def _asked(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    topic: str | None,
    key: str | None,
    key_hex: str | None,
    cause: str | None,
    since: str | None,
    until: str | None,
    dead: bool = False,
) -> Wanted:
    now = datetime.now(UTC)
    return Wanted(
        name=name,
        topic=topic,
        key=_key_bytes(key, key_hex),
        cause=cause,
        since=None if since is None else parse_moment(since, now=now, what="--since"),
        until=None if until is None else parse_moment(until, now=now, what="--until"),
        dead=dead,
    )


def _key_bytes(text: str | None, in_hex: str | None) -> bytes | None:
    if text is not None and in_hex is not None:
        raise UsageError("a key is given twice.", hint="Use --key or --key-hex.")
    if in_hex is None:
        # The shell may have passed bytes that are no text.
        return None if text is None else text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(in_hex.removeprefix("0x"))
    except ValueError:
        message = f"--key-hex is {in_hex!r}, which is not hexadecimal."
        raise UsageError(message, hint="Write two digits a byte, like 00ff.") from None


# For people


def _sum_up(connection: Connection, wanted: Wanted) -> None:
    from sideline.ledger.reading import waiting  # noqa: PLC0415 - imports psycopg

    for name, (events, aside) in waiting(connection, wanted.name).items():
        if events:
            console_err.print(
                f"{name}: {events:,} events parked, {aside:,} keys aside.", markup=False
            )


def _named(
    wanted: Wanted, head: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> tuple[Sequence[str], Sequence[tuple[Any, ...]]]:
    """With the pipeline's name as the first column, unless that was asked for."""
    if wanted.name is None:
        return ("pipeline", *head), rows
    return head, [row[1:] for row in rows]


def _print_page(
    head: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    after: str | None,
    *,
    what: str = "parked",
) -> None:
    if not rows:
        console_err.print(f"Nothing that was asked for is {what}.")
        return
    print_table(head, rows)
    _next(after)


def _next(after: str | None) -> None:
    if after is not None:
        console_err.print(f"There is more: --after {after}", markup=False, soft_wrap=True)
