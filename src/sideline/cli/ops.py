"""`sideline ops`: operations under way and past, and a hand on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sideline import settings, showing
from sideline.cli.operations_views import (
    chosen,
    operation_json,
    operation_lines,
    progress,
)
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.cli.watching import watch_operations

F = TypeVar("F", bound=Callable[..., Any])

HIGHEST_ID = 2**63 - 1
CHOSEN_CHARACTERS = 60
NUMBER = click.IntRange(1, HIGHEST_ID)


@click.group(no_args_is_help=True)
def ops() -> None:
    """Releases, discards and restores: list, show, pause, resume, cancel."""


@ops.command("list")
@click.argument("name", required=False)
@click.option("--open", "only_open", is_flag=True, help="Only what is not over.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Lines."
)
@click.option("--after", type=NUMBER, metavar="ID", help="Where the page before ended.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def list_(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    only_open: bool,
    limit: int,
    after: int | None,
    database: str | None,
    as_json: bool,
) -> None:
    """List operations, the newest first."""
    from sideline.ledger.reading import opened, waiting  # noqa: PLC0415 - imports psycopg
    from sideline.operations import page  # noqa: PLC0415

    with opened(settings.load(database=database).require_database(), role="ops") as connection:
        if name is not None:
            waiting(connection, name)
        # One more than is shown: it tells whether there is another page.
        rows = page(connection, pipeline=name, only_open=only_open, limit=limit + 1, after=after)
    following = rows[limit - 1].id if len(rows) > limit else None
    rows = rows[:limit]
    if as_json:
        print_json({"operations": [operation_json(row) for row in rows], "next": following})
        return
    if not rows:
        console_err.print("There is no operation.")
        return
    print_table(
        ("id", "pipeline", "what", "state", "items", "events", "by", "begun", "chosen", "note"),
        [
            (
                row.id,
                showing.words(row.pipeline),
                row.kind,
                row.state,
                row.items,
                f"{progress(row)}, of {row.total:,}",
                showing.words(row.actor),
                showing.moment(row.created_at),
                showing.short(chosen(row), CHOSEN_CHARACTERS),
                showing.short(row.note or "", CHOSEN_CHARACTERS),
            )
            for row in rows
        ],
    )
    if following is not None:
        console_err.print(f"There is more: --after {following}", markup=False)


@ops.command()
@click.argument("number", metavar="ID", type=NUMBER)
@click.option("--watch", is_flag=True, help="Show how it goes until it is over.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def show(*, number: int, watch: bool, database: str | None, as_json: bool) -> int:
    """Show an operation: what was chosen, by whom, and how far it is."""
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.place import is_held  # noqa: PLC0415
    from sideline.ledger.reading import opened  # noqa: PLC0415

    url = settings.load(database=database).require_database()
    code = 0
    with opened(url, role="ops") as connection:
        found = operations.find(connection, number)
    if watch and not found.is_over:
        code, _ = watch_operations(url, [number])
    with opened(url, role="ops") as connection:
        found = operations.find(connection, number)
        items = operations.items(connection, number)
        running = is_held(connection, found.pipeline)
    if as_json:
        print_json(operation_json(found, items) | {"driver": running})
    else:
        click.echo("\n".join(operation_lines(found, items, running=running)))
    return code


def _steering(command: F) -> F:
    """Add what pause, resume and cancel take."""
    options = (
        click.argument("number", metavar="ID", type=NUMBER),
        click.option("--reason", metavar="TEXT", help="Why; kept in the audit."),
        click.option("--database", metavar="URL", help="PostgreSQL."),
    )
    for option in reversed(options):
        command = option(command)
    return json_option(command)


@ops.command()
@_steering
def pause(**given: Any) -> None:  # noqa: ANN401 - one an option
    """Begin nothing more of it until it is resumed."""
    _steer("pause", **given)


@ops.command()
@_steering
def resume(**given: Any) -> None:  # noqa: ANN401 - one an option
    """Let it go on: paused, stopped by itself, or the next step of a ramp."""
    _steer("resume", **given)


@ops.command()
@_steering
def cancel(**given: Any) -> None:  # noqa: ANN401 - one an option
    """Begin nothing more of it, for good; what is done stays done."""
    _steer("cancel", **given)


def _steer(
    verb: str, *, number: int, reason: str | None, database: str | None, as_json: bool
) -> None:
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger import audit  # noqa: PLC0415
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.ledger.reading import understood  # noqa: PLC0415

    if reason is not None:
        reason = audit.reason(reason)
    changes = {
        "pause": operations.pause,
        "resume": operations.resume,
        "cancel": operations.cancel,
    }
    url = settings.load(database=database).require_database()
    with understood(url), reach(url, role="ops") as connection:
        found = changes[verb](connection, number, actor=audit.actor(), reason=reason)
    if as_json:
        print_json(operation_json(found))
        return
    console_err.print(
        f"Operation {number} is {found.state}: {progress(found)}, of {found.total:,} events.",
        markup=False,
    )
