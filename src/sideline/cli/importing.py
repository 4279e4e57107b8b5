"""`sideline parked import`: dead letters that others wrote, into the ledger."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from sideline import guardrail, loading, settings, showing
from sideline.cli.output import Steps, console_err, json_option, print_json
from sideline.errors import NotFoundError

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.ledger.importing import Tally


@click.command("import")
@click.argument("topic")
@click.option(
    "--pipeline",
    "target",
    metavar="NAME",
    required=True,
    help="Whose events they were: a pipeline that has run here, or APP:NAME.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be imported; change nothing.")
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def import_(  # noqa: PLR0913 - one parameter an option
    *,
    topic: str,
    target: str,
    dry_run: bool,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Take a dead-letter topic into the ledger, as dead events; again adds nothing.

    Headers of sideline, Spring, Kafka Connect, Kafka Streams and share groups are understood.
    """
    from sideline.engine.lease import Partition  # noqa: PLC0415
    from sideline.ledger import audit, importing, reading, schema  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.topics import scanning  # noqa: PLC0415 - imports confluent-kafka
    from sideline.topics.admin import Cluster  # noqa: PLC0415

    found = settings.load(kafka=kafka, database=database)
    url, properties = found.require_database(), found.kafka_client()
    cluster = Cluster(properties)
    letters = cluster.topic(topic)
    spots = [Partition(topic, number) for number in letters.partitions]
    with reading.understood(url), reach(url, role="import") as connection:
        there = True
        if dry_run:
            there = reading.schema_of(connection)
        else:
            schema.ensure(connection)
        name, topics = _pipeline(connection, target, there=there, execute=not dry_run)
        connection.commit()
        source = importing.Source(topics, _ends(cluster, topics))
        begins, ends = cluster.beginnings(spots), cluster.ends(spots)
        with Steps() as steps:
            bar = steps.bar(topic, max(1, sum(ends[spot] - begins[spot] for spot in spots)))
            tally = importing.take_in(
                connection,
                name,
                scanning.scan(properties, begins, ends),
                source,
                actor=audit.actor(),
                there=there,
                execute=not dry_run,
                progress=bar.reach,
            )
            bar.close()
    if as_json:
        print_json(
            {"pipeline": name, "topic": topic, "dry_run": dry_run, **dataclasses.asdict(tally)}
        )
        return
    for line in _words(name, topic, tally, dry_run=dry_run):
        console_err.print(showing.words(line), markup=False, soft_wrap=True)


def _pipeline(
    connection: Connection, target: str, *, there: bool, execute: bool
) -> tuple[str, list[str]]:
    """The pipeline's name and sources; one that is declared need not have run yet."""
    from sideline.ledger.sql import queries  # noqa: PLC0415 - imports psycopg

    name = target
    if ":" in target:
        pipeline = loading.load(target)
        name = pipeline.name
        named: dict[str, Any] = {
            "pipeline": name,
            "topics": list(pipeline.topics),
            "order_free": guardrail.is_order_free(pipeline),
        }
        if execute:
            connection.execute(queries()["know_pipeline"], named)
        return name, list(pipeline.topics)
    known = {"pipeline": name}
    row = connection.execute(queries()["topics_of_pipeline"], known).fetchone() if there else None
    if row is None:
        message = f"no pipeline {name!r} has run with this database."
        hint = "Name it as APP:NAME if it has not run yet, like examples/users.py:users."
        raise NotFoundError(message, hint=hint)
    return name, list(row[0])


def _ends(cluster: Any, topics: list[str]) -> dict[Any, int]:  # noqa: ANN401 - see Cluster
    """Where the pipeline's sources end; one that is gone has no offsets to name."""
    from sideline.engine.lease import Partition  # noqa: PLC0415

    spots = []
    for topic in topics:
        try:
            spots += [Partition(topic, number) for number in cluster.topic(topic).partitions]
        except NotFoundError:
            continue
    return dict(cluster.ends(spots))


def _words(name: str, topic: str, tally: Tally, *, dry_run: bool) -> list[str]:
    from sideline.ledger.importing import REASONS  # noqa: PLC0415 - imports psycopg

    would = "would be imported" if dry_run else "imported"
    lines = [f"{topic}: {tally.read:,} records read, {tally.imported:,} {would} into {name}."]
    if tally.before:
        lines.append(f"{tally.before:,} were imported before.")
    if tally.tombstones:
        lines.append(f"{tally.tombstones:,} are tombstones.")
    lines += [
        f"{count:,} are kept under their position in {topic}: {REASONS[reason]} "
        f"(for example {tally.examples[reason]})."
        for reason, count in sorted(tally.elsewhere.items())
    ]
    if tally.imported:
        lines.append(
            "They are dead events. They can be released only where order does not matter: "
            "upserts with a version, or independent=True."
        )
    return lines
