"""`sideline alerts`: what somebody should know."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.errors import CheckError

if TYPE_CHECKING:
    from sideline.ledger.alerts import AlertRow

MESSAGE_CHARACTERS = 300
# The largest number that PostgreSQL gives an alert.
HIGHEST_ID = 2**63 - 1


@click.command()
@click.argument("name", required=False)
@click.option("--all", "cleared", is_flag=True, help="Also those that are over.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Lines."
)
@click.option(
    "--after",
    type=click.IntRange(1, HIGHEST_ID),
    metavar="ID",
    help="Where the page before ended.",
)
@click.option("--check", is_flag=True, help="Exit with 3 if one is open.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def alerts(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    cleared: bool,
    limit: int,
    after: int | None,
    check: bool,
    database: str | None,
    as_json: bool,
) -> int:
    """Show open alerts of all pipelines, or of one; the newest first."""
    from sideline.ledger.alerts import count_open, page  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.reading import opened, waiting  # noqa: PLC0415

    url = settings.load(database=database).require_database()
    with opened(url, role="alerts") as connection:
        known = waiting(connection, name)
        # One more than is shown: it tells whether there is another page.
        rows = (
            page(connection, name, cleared=cleared, limit=limit + 1, after=after) if known else []
        )
        count = count_open(connection, name) if known else 0
    following = rows[limit - 1].id if len(rows) > limit else None
    if as_json:
        shown = [dataclasses.asdict(row) for row in rows[:limit]]
        print_json({"alerts": shown, "open": count, "next": following})
    else:
        _show(rows[:limit], following, count, cleared=cleared)
    return CheckError.exit_code if check and count else 0


def _show(rows: list[AlertRow], following: int | None, count: int, *, cleared: bool) -> None:
    now = datetime.now(UTC)
    if rows:
        head = ("id", "pipeline", "kind", "subject", "raised", "age", "message")
        over = ("cleared",) if cleared else ()
        print_table(
            (*head[:5], *over, *head[5:]), [_line(row, now, cleared=cleared) for row in rows]
        )
    if not count:
        console_err.print("No alert is open.")
    if following is not None:
        console_err.print(f"There is more: --after {following}", markup=False)


def _line(row: AlertRow, now: datetime, *, cleared: bool) -> tuple[str | int, ...]:
    over = () if not cleared else (showing.moment(row.cleared_at) if row.cleared_at else "open",)
    return (
        row.id,
        row.pipeline,
        row.kind,
        showing.words(row.subject) or "all",
        showing.moment(row.raised_at),
        *over,
        _age(((row.cleared_at or now) - row.raised_at).total_seconds()),
        showing.short(row.message, MESSAGE_CHARACTERS),
    )


def _age(seconds: float) -> str:
    """How long it has lasted, in two units at most: 40s, 12m, 3h 5m, 2d 4h."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m" if minutes else f"{whole}s"
