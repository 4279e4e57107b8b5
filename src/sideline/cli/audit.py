"""`sideline audit`: who changed what, when and why."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import orjson

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.views import parse_moment

if TYPE_CHECKING:
    from sideline.ledger.audit import Entry

SUBJECT_CHARACTERS = 200
REASON_CHARACTERS = 200
HIGHEST_ID = 2**63 - 1


@click.command()
@click.argument("name", required=False)
@click.option("--action", metavar="WORD", help="Only this: release, discard, pause ...")
@click.option("--by", "actor", metavar="USER", help="Only of this person: user, or user@host.")
@click.option("--since", metavar="WHEN", help="A time with its zone, or an age like 2h.")
@click.option("--until", metavar="WHEN", help="The same; what is older.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Lines."
)
@click.option(
    "--after",
    type=click.IntRange(1, HIGHEST_ID),
    metavar="ID",
    help="Where the page before ended.",
)
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def audit(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    action: str | None,
    actor: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    after: int | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Show changes by people, of all pipelines or of one; the newest first."""
    from sideline.ledger.audit import page  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.reading import opened, schema_of  # noqa: PLC0415

    now = datetime.now(UTC)
    asked: dict[str, Any] = {
        "pipeline": name,
        "action": action,
        "actor": actor,
        "since": None if since is None else parse_moment(since, now=now, what="--since"),
        "until": None if until is None else parse_moment(until, now=now, what="--until"),
    }
    url = settings.load(database=database).require_database()
    with opened(url, role="audit") as connection:
        rows: list[Entry] = []
        # No such pipeline is no error here: what was forgotten is still in the books.
        if schema_of(connection):
            # One more than is shown: it tells whether there is another page.
            rows = page(connection, **asked, limit=limit + 1, after=after)
    following = rows[limit - 1].id if len(rows) > limit else None
    if as_json:
        shown = [dataclasses.asdict(row) for row in rows[:limit]]
        print_json({"changes": shown, "next": following})
        return
    if not rows:
        console_err.print("Nobody has changed anything that was asked for.")
        return
    print_table(
        ("id", "when", "who", "what", "pipeline", "count", "subject", "reason"),
        [_line(row) for row in rows[:limit]],
    )
    if following is not None:
        console_err.print(f"There is more: --after {following}", markup=False)


def _line(row: Entry) -> tuple[str | int, ...]:
    subject = orjson.dumps(row.subject).decode() if row.subject else ""
    return (
        row.id,
        showing.moment(row.at),
        showing.words(row.actor),
        showing.words(row.action),
        showing.words(row.pipeline or "-"),
        "" if row.count is None else row.count,
        showing.short(subject, SUBJECT_CHARACTERS),
        showing.short(row.reason or "", REASON_CHARACTERS),
    )
