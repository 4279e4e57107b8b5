"""`sideline purge`: empty dead-letter and stash topics of what is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sideline import settings, showing
from sideline.cli.output import Steps, console_err, json_option, print_json
from sideline.errors import UsageError
from sideline.views import parse_moment

if TYPE_CHECKING:
    from sideline.ledger.purging import Damaged, Plan


@click.command()
@click.argument("name", required=False)
@click.option("--day", metavar="DATE", help="What was parked on a day (UTC): 2026-11-15.")
@click.option("--before", metavar="WHEN", help="What was parked before a time, or an age like 30d.")
@click.option(
    "--release", type=click.IntRange(1), metavar="ID", help="What a release brought back."
)
@click.option(
    "--source",
    is_flag=True,
    help="Also tombstone damaged events in a compacted source topic, where each is its key's last.",
)
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def purge(  # noqa: PLR0913 - one parameter an option
    *,
    name: str | None,
    day: str | None,
    before: str | None,
    release: int | None,
    source: bool,
    execute: bool,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Take copies of events that are over out of dead-letter and stash topics.

    Over is what was applied after all, or discarded. What still waits, or is dead and nobody gave
    it up, stays. The pipeline itself sends the tombstones. NAME: one pipeline, otherwise all.
    """
    from sideline.ledger import audit, purging, reading  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.topics.admin import Cluster  # noqa: PLC0415 - imports confluent-kafka

    span = _span(day, before, release)
    found = settings.load(kafka=kafka, database=database)
    url, properties = found.require_database(), found.kafka_client()
    cluster = Cluster(properties)
    cases: list[Case] = []
    with reading.understood(url), reach(url, role="purge") as connection, Steps() as steps:
        if release is not None:
            name = purging.pipeline_of(connection, release)
        for pipeline in reading.waiting(connection, name):
            chosen = purging.Chosen(pipeline, *span, release)
            plan = purging.look(connection, chosen, cluster)
            damaged = (
                purging.look_at_source(connection, chosen, cluster, properties) if source else []
            )
            done = 0
            if execute:
                bar = steps.bar(pipeline, max(1, sum(plan.topics.values())))
                done = purging.purge(
                    connection, chosen, plan, actor=audit.actor(), progress=bar.reach
                )
                done += purging.purge_source(connection, pipeline, damaged, actor=audit.actor())
                bar.close()
            cases.append(Case(pipeline, plan, damaged, done))
    if as_json:
        print_json({"executed": execute, "pipelines": [_as_json(case) for case in cases]})
        return
    for line in _words(cases, execute=execute):
        console_err.print(showing.words(line), markup=False, soft_wrap=True)


class Case(NamedTuple):
    """What is purged of a pipeline's topics."""

    pipeline: str
    plan: Plan
    damaged: list[Damaged]
    done: int
    """Tombstones that were written."""

    @property
    def wanted(self) -> int:
        """Tombstones that are to be written."""
        at_source = sum(one.reason is None for one in self.damaged)
        return sum(self.plan.topics.values()) + at_source


def _span(
    day: str | None, before: str | None, release: int | None
) -> tuple[datetime | None, datetime | None]:
    """From when to when events were parked."""
    if sum(given is not None for given in (day, before, release)) != 1:
        message = "say what is to be purged: one of --day, --before, --release."
        raise UsageError(message, hint="For example --day 2026-11-15, or --before 30d.")
    if before is not None:
        return None, parse_moment(before, now=datetime.now(UTC), what="--before")
    if day is None:
        return None, None
    try:
        since = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC)
        return since, since + timedelta(days=1)
    except (ValueError, OverflowError):
        message = f"--day is {day!r}, which is not a day."
        raise UsageError(message, hint="Write it like 2026-11-15.") from None


def _as_json(case: Case) -> dict[str, Any]:
    return {
        "pipeline": case.pipeline,
        "topics": case.plan.topics,
        "open": case.plan.open,
        "kept": case.plan.kept,
        "source": [
            {"id": _id(one), "tombstone": one.reason is None, "reason": one.reason}
            for one in case.damaged
        ],
        "tombstones": case.done,
    }


def _words(cases: list[Case], *, execute: bool) -> list[str]:
    lines = []
    for case in cases:
        plan = case.plan
        lines += [f"{topic}: {count:,} records are over." for topic, count in plan.topics.items()]
        lines += [f"{topic} is left alone: {why}." for topic, why in plan.kept.items()]
        for one in case.damaged:
            lines.append(
                f"{_id(one)} is left in its topic: {one.reason}."
                if one.reason
                else f"{_id(one)} gets a tombstone in its topic: whoever reads it sees its key "
                "deleted."
            )
        if plan.open:
            lines.append(f"{case.pipeline}: {plan.open:,} events are open: their records stay.")
    if not any(case.wanted for case in cases):
        return [*lines, "Nothing is to be purged."]
    if execute:
        done = sum(case.done for case in cases)
        return [*lines, f"{done:,} tombstones are in the outbox: the pipeline sends them."]
    return [*lines, "Nothing is changed yet: --execute does it."]


def _id(one: Damaged) -> str:
    return f"{one.event.topic}/{one.event.partition}/{one.event.offset}"
