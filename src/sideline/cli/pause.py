"""`sideline pause` and `resume`: keep a pipeline, or some partitions of it, waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json

if TYPE_CHECKING:
    from sideline.ledger.pausing import Pause

F = TypeVar("F", bound=Callable[..., Any])


def _what(command: F) -> F:
    """Add what both commands take."""
    options = (
        click.argument("name"),
        click.option(
            "--partition",
            "partitions",
            metavar="TOPIC/N",
            multiple=True,
            help="Only this one; N alone where one topic has it. May be repeated.",
        ),
        click.option("--database", metavar="URL", help="PostgreSQL."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_what
@click.option("--reason", metavar="TEXT", help="Why; `sideline status` shows it.")
@json_option
def pause(
    *,
    name: str,
    partitions: tuple[str, ...],
    database: str | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Keep a pipeline waiting until it is resumed, also over restarts."""
    from sideline.ledger.audit import actor  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.ledger.pausing import pause as mark  # noqa: PLC0415
    from sideline.ledger.reading import understood  # noqa: PLC0415

    url = settings.load(database=database).require_database()
    with understood(url), reach(url, role="pause") as connection:
        found = mark(connection, name, partitions, who=actor(), reason=reason)
    _say(found, as_json=as_json, done="is paused", before="was paused already")


@click.command()
@_what
@json_option
def resume(*, name: str, partitions: tuple[str, ...], database: str | None, as_json: bool) -> None:
    """Let a paused pipeline, or a partition of it, go on."""
    from sideline.ledger.audit import actor  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.ledger.pausing import resume as free  # noqa: PLC0415
    from sideline.ledger.reading import understood  # noqa: PLC0415

    url = settings.load(database=database).require_database()
    with understood(url), reach(url, role="resume") as connection:
        found = free(connection, name, partitions, who=actor())
    _say(found, as_json=as_json, done="goes on", before="was not paused")


def _say(found: Pause, *, as_json: bool, done: str, before: str) -> None:
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    for names, words in ((found.changed, done), (found.already, before)):
        for name in names:
            _speak(f"{name} {words}.")
    if found.unsent:
        one = found.unsent == 1
        records = "1 record" if one else f"{found.unsent:,} records"
        _speak(
            f"{records} of {found.pipeline} {'waits' if one else 'wait'} to be sent; "
            f"while it runs {'it is' if one else 'they are'} sent, paused or not."
        )
    left = [name for name in found.partitions if name not in (*found.changed, *found.already)]
    if found.paused and found.pipeline not in (*found.changed, *found.already):
        _speak(f"{found.pipeline} as a whole is paused: sideline resume {found.pipeline}")
    if left:
        flags = " ".join(f"--partition {name}" for name in left)
        _speak(f"Paused by themselves: sideline resume {found.pipeline} {flags}")


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
