"""`sideline release`: handle again what waits, once the code is mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sideline.cli.choosing import STOP_AT, Asked, How, carry_out, choices, finite, planned
from sideline.cli.fetching import fetcher
from sideline.cli.operations_views import plan_json, plan_lines, trial_json, trial_lines
from sideline.cli.output import Steps, print_json
from sideline.errors import PartialError, UsageError
from sideline.selections import LEAST_RATE, MOST_RATE

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline
    from sideline.selections import Plan
    from sideline.trial import Waiting


@click.command()
@choices
@click.option(
    "--rate",
    type=click.FloatRange(LEAST_RATE, MOST_RATE),
    callback=finite,
    metavar="EVENTS/S",
    help="At most so many events a second.",
)
@click.option(
    "--stop-at",
    type=click.FloatRange(0, 1, min_open=True),
    callback=finite,
    default=STOP_AT,
    show_default=True,
    metavar="SHARE",
    help="Stop by itself when what failed again reaches this share, of at least 10 events.",
)
@click.option(
    "--ramp",
    is_flag=True,
    help="1 key, then 10, 100, all: each step only if nothing of the one before failed.",
)
@click.option("--reason", metavar="TEXT", help="Why; kept in the audit.")
@click.option("--dead", is_flag=True, help="Dead events in place of parked ones.")
@click.option(
    "--trial", is_flag=True, help="Run the handler of --app on them and take everything back."
)
@click.option(
    "--app", metavar="APP:NAME", help="The pipeline as `sideline run` takes it: its code of today."
)
@click.option(
    "--most",
    type=click.IntRange(1, 100_000),
    default=1_000,
    show_default=True,
    metavar="N",
    help="With --trial: so many events at most.",
)
@click.option(
    "--kafka", metavar="HOST:PORT", help="With --trial: where bytes are that the ledger has not."
)
def release(  # noqa: PLR0913 - one parameter an option
    *,
    rate: float | None,
    stop_at: float,
    ramp: bool,
    reason: str | None,
    dead: bool,
    trial: bool,
    app: str | None,
    most: int,
    kafka: str | None,
    **options: Any,  # noqa: ANN401 - those of `choices`
) -> int:
    """Handle again what is parked, in order, with what waits behind it.

    Shows what would go; --execute does it. The owner of the keys' partition carries it out: the
    running pipeline, or `sideline run APP:NAME --replay-only`.
    """
    asked = Asked(**options)
    selection = asked.selection("release", dead=dead)
    _refuse_misfits(asked, trial=trial, ramp=ramp, app=app)
    why = _reason(reason)
    how = How(rate, stop_at, ramp, app)
    pipeline = _load(app, asked.name)
    with planned(asked, selection, pipeline) as (connection, shown):
        if trial and pipeline is not None:
            from sideline.trial import read  # noqa: PLC0415 - imports psycopg

            events = read(connection, shown, fetcher(connection, kafka), most=most)
            connection.rollback()
            words = how.words(asked.database)
            lines = plan_lines(shown, execute=False, reason=why, how=words)
            if not asked.as_json:
                click.echo("\n".join(lines))
            return _try(asked, pipeline, connection, shown, events)
        return carry_out(asked, connection, shown, how, reason=why, pipeline=pipeline)


def _try(
    asked: Asked,
    pipeline: Pipeline,
    connection: Connection,
    shown: Plan,
    events: list[Waiting],
) -> int:
    from sideline.trial import run  # noqa: PLC0415 - imports psycopg

    with Steps() as steps:
        bar = steps.bar(f"trial {pipeline.name}", len(events))
        found = run(pipeline, connection, events, progress=bar.reach)
        bar.close()
    if asked.as_json:
        print_json({"plan": plan_json(shown), "executed": False, "trial": trial_json(found)})
    else:
        click.echo("\n".join(trial_lines(found, shown)))
    return PartialError.exit_code if found.failed else 0


def _refuse_misfits(asked: Asked, *, trial: bool, ramp: bool, app: str | None) -> None:
    if trial and asked.execute:
        message = "--trial changes nothing, and --execute does."
        raise UsageError(message, hint="Try first, then execute.")
    if trial and app is None:
        message = "--trial needs the handler's code."
        raise UsageError(
            message, hint="Name it as for `sideline run`: --app examples/users.py:users"
        )
    if ramp and asked.first is not None:
        message = "--ramp and --first both say how many."
        raise UsageError(message, hint="Use one of them.")


def _load(app: str | None, name: str | None) -> Pipeline | None:
    if app is None:
        return None
    from sideline import loading  # noqa: PLC0415 - imports the user's code

    pipeline = loading.load(app)
    if name is not None and name != pipeline.name:
        message = f"{app} is pipeline {pipeline.name!r}, not {name!r}."
        raise UsageError(message, hint="Leave one of them out.")
    return pipeline


def _reason(text: str | None) -> str | None:
    if text is None:
        return None
    from sideline.ledger.audit import reason  # noqa: PLC0415 - imports psycopg

    return reason(text)
