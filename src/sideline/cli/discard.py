"""`sideline discard` and `restore`: give up on events, with a reason, and take that back (R6)."""

from __future__ import annotations

from typing import Any

import click

from sideline.cli.choosing import Asked, carry_out, choices, planned
from sideline.errors import RefusedError


@click.command()
@choices
@click.option(
    "--followers", is_flag=True, help="Also what waits behind them: the whole tail of the key."
)
@click.option("--dead", is_flag=True, help="Dead events in place of parked ones.")
@click.option("--reason", metavar="TEXT", required=True, help="Why; kept in the audit.")
def discard(*, followers: bool, dead: bool, reason: str, **options: Any) -> int:  # noqa: ANN401
    """Give up on events that failed: nobody handles them any more.

    What follows them stays parked and can be released. Shows what would go; --execute does it.
    """
    from sideline.ledger import audit  # noqa: PLC0415 - imports psycopg

    asked = Asked(**options)
    selection = asked.selection("discard", followers=followers, dead=dead)
    why = audit.reason(reason)
    with planned(asked, selection) as (connection, shown):
        return carry_out(asked, connection, shown, reason=why)


@click.command()
@choices
@click.option("--reason", metavar="TEXT", required=True, help="Why; kept in the audit.")
def restore(*, reason: str, **options: Any) -> int:  # noqa: ANN401 - those of `choices`
    """Put discarded events back in their places, while their keys are still aside.

    Times are those of the discarding; --first counts events. Shows what would come back;
    --execute does it.
    """
    from sideline.ledger import audit  # noqa: PLC0415 - imports psycopg

    asked = Asked(**options)
    selection = asked.selection("restore")
    why = audit.reason(reason)
    with planned(asked, selection) as (connection, shown):
        if asked.execute and shown.late and not shown.items:
            message = (
                f"none of the {shown.late:,} events can be put back: their keys have rejoined, or "
                "what stood behind them is applied."
            )
            raise RefusedError(message, hint="Nothing was changed.")
        return carry_out(asked, connection, shown, reason=why)
