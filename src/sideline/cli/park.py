"""`sideline park`: set aside by hand what a partition waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json
from sideline.views import EventId

if TYPE_CHECKING:
    from sideline.ledger.asking import Stuck


@click.command()
@click.argument("event", metavar="ID")
@click.argument("name", required=False)
@click.option("--reason", metavar="TEXT", required=True, help="Why; kept with the event.")
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def park(  # noqa: PLR0913 - one parameter an option
    *,
    event: str,
    name: str | None,
    reason: str,
    execute: bool,
    database: str | None,
    as_json: bool,
) -> None:
    """Set aside an event that its partition blocks or backs off on.

    ID is topic/partition/offset; NAME the pipeline, where several wait for the event.
    """
    from sideline.ledger import asking, audit, reading  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415

    wanted, why = EventId.parse(event), audit.reason(reason)
    url = settings.load(database=database).require_database()
    with reading.understood(url), reach(url, role="park") as connection:
        stuck = asking.look(connection, wanted, name)
        connection.rollback()
        if execute:
            asking.ask(connection, wanted, stuck.pipeline, why, who=audit.actor())
    if as_json:
        print_json(
            {
                "id": str(wanted),
                "pipeline": stuck.pipeline,
                "reason": why,
                "trouble": stuck.trouble,
                "attempts": stuck.attempts,
                "paused": stuck.paused,
                "asked_before": stuck.park_at == wanted.offset,
                "executed": execute,
            }
        )
        return
    for line in _plan(stuck, wanted, why, execute=execute):
        console_err.print(line, markup=False, soft_wrap=True)


def _plan(stuck: Stuck, event: EventId, reason: str, *, execute: bool) -> list[str]:
    partition = f"{event.topic}/{event.partition}"
    trouble = f": {showing.short(stuck.trouble, 300)}" if stuck.trouble else "."
    waits = f"Partition {partition} of pipeline {stuck.pipeline} waits for {event}"
    lines = [
        f"{waits}, after {stuck.attempts:,} attempts{trouble}",
        "It is set aside with what follows it of its key, and the partition goes on.",
        f"Reason: {showing.words(reason)}",
    ]
    if stuck.park_at == event.offset:
        before = showing.words(stuck.park_reason or "")
        lines.append(f"That was asked for before, for the reason: {before}")
    if stuck.paused:
        lines.append("It is paused: nothing happens before `sideline resume`.")
    if execute:
        lines.append("Asked for: the next lease of the partition does it.")
    else:
        lines.append("Nothing is changed yet: --execute does it.")
    return lines
