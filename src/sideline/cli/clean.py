"""`sideline clean`: take away what is over and old, of pipelines that do not run, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sideline import retention, settings, showing
from sideline.cli.output import Steps, console_err, json_option, print_json, print_table
from sideline.errors import UsageError

if TYPE_CHECKING:
    from datetime import timedelta

    from sideline.ledger.connection import Connection
    from sideline.retention import Retention


@click.command()
@click.argument("name", required=False)
@click.option(
    "--older-than", metavar="AGE", help="Like 30d; by default what is configured for each kind."
)
@click.option("--audit", "with_audit", is_flag=True, help="The audit, too.")
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def clean(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    older_than: str | None,
    with_audit: bool,
    execute: bool,
    database: str | None,
    as_json: bool,
) -> None:
    """Remove resolved and skipped events, the bytes of discarded ones, and what else is over.

    NAME is one pipeline; without it all of them. What still waits is never touched.
    """
    from sideline.ledger import cleaning, reading  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415

    found = settings.load(database=database)
    keep = _ages(found.retention, older_than, with_audit=with_audit)
    url = found.require_database()
    with reading.understood(url), reach(url, role="clean") as connection:
        names: list[str | None] = [*reading.waiting(connection, name)]
        if name is None:
            # What people did to no pipeline in particular.
            names.append(None)
        plan = {one: cleaning.count(connection, one, keep) for one in names}
        if execute:
            _work(connection, plan, keep, reason=older_than)
    if as_json:
        counts = {one or "": found for one, found in plan.items() if any(found.values())}
        print_json({"pipelines": counts, "executed": execute})
        return
    rows = [
        (one or "-", kind, number)
        for one, counts in plan.items()
        for kind, number in counts.items()
        if number
    ]
    if not rows:
        _speak("Nothing is old enough.")
        return
    print_table(("pipeline", "what", "old" if not execute else "removed"), rows)
    if not execute:
        _speak("Nothing is changed yet: --execute does it.")


def _ages(keep: Retention, older_than: str | None, *, with_audit: bool) -> Retention:
    from sideline.retention import Retention  # noqa: PLC0415

    if older_than is None:
        return keep if with_audit else Retention(keep.events, keep.operations, keep.alerts, None)
    try:
        age: timedelta | None = retention.age(older_than)
    except ValueError as error:
        message = f"--older-than {showing.words(older_than)} {error}."
        raise UsageError(message, hint="Write it like 12h or 30d.") from None
    if age is None:
        raise UsageError("--older-than never cleans nothing.", hint="Write it like 12h or 30d.")
    return Retention(age, age, age, age if with_audit else None)


def _work(
    connection: Connection,
    plan: dict[str | None, dict[str, int]],
    keep: Retention,
    *,
    reason: str | None,
) -> None:
    from sideline.ledger import audit, cleaning  # noqa: PLC0415 - imports psycopg

    with Steps() as steps:
        for name, counts in plan.items():
            if not any(counts.values()):
                continue
            bar = steps.bar(name or "audit", max(1, sum(counts.values())))
            total: dict[str, int] = {}
            while True:
                taken = cleaning.step(connection, name, keep)
                total = cleaning.merged((total, taken))
                bar.reach(sum(total.values()))
                if cleaning.is_done(taken):
                    break
            plan[name] = total
            audit.record(
                connection,
                "clean",
                actor=audit.actor(),
                pipeline=name,
                subject={kind: number for kind, number in total.items() if number},
                count=sum(total.values()),
                reason=f"older than {reason}" if reason else None,
            )
            connection.commit()


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
