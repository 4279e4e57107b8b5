"""`sideline forget`: everything of a pipeline that is no more."""

from __future__ import annotations

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.errors import UsageError


@click.command()
@click.argument("name")
@click.option(
    "--discard-parked", is_flag=True, help="Give up what waits; needs a reason, and loses events."
)
@click.option("--reason", metavar="TEXT", help="Why; kept in the audit.")
@click.option("--group-offsets", is_flag=True, help="The group's offsets in Kafka, too.")
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers, for --group-offsets.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def forget(  # noqa: PLR0913 - one parameter an option
    *,
    name: str,
    discard_parked: bool,
    reason: str | None,
    group_offsets: bool,
    execute: bool,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Remove everything that the ledger has of a pipeline, and its progress with it.

    A pipeline of that name that runs again begins anew. The audit stays.
    """
    from sideline.ledger import audit, erasing, reading  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415

    why = None if reason is None else audit.reason(reason)
    if discard_parked and why is None:
        raise UsageError("--discard-parked needs a reason.", hint="Say --reason TEXT.")
    found = settings.load(kafka=kafka, database=database)
    url = found.require_database()
    with reading.understood(url), reach(url, role="forget") as connection:
        plan = erasing.belongings(connection, name)
        erasing.check_idle(connection, [name, *plan.runs])
        connection.rollback()
        if plan.waiting and not discard_parked:
            raise erasing.would_lose(name, plan.waiting)
        if execute:
            if group_offsets:
                from sideline.topics.admin import Cluster  # noqa: PLC0415

                # First: it only shows progress, and may be refused.
                Cluster(found.kafka_client()).forget_group(name)
            plan = erasing.forget(
                connection, name, discard=discard_parked, actor=audit.actor(), reason=why
            )
    if as_json:
        print_json(
            {
                "pipeline": name,
                "rows": plan.rows,
                "waiting": plan.waiting,
                "runs": plan.runs,
                "group_offsets": group_offsets,
                "executed": execute,
            }
        )
        return
    head = ("table", "removed" if execute else "rows")
    print_table(head, [(table, number) for table, number in plan.rows.items()])
    if plan.waiting:
        _speak(f"{plan.waiting:,} events that were never applied are given up.")
    if not execute:
        _speak("Nothing is changed yet: --execute does it.")


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
