"""`sideline status`: progress, lag and state of pipelines."""

from __future__ import annotations

from typing import Any

import click

from sideline import settings
from sideline.cli.output import console_err, json_option, print_json, print_table


@click.command()
@click.argument("name", required=False)
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def status(*, name: str | None, kafka: str | None, database: str | None, as_json: bool) -> None:
    """Show progress, lag and state of all pipelines, or of one with its partitions."""
    from sideline.status import gather  # noqa: PLC0415 - imports psycopg and confluent-kafka

    found = gather(settings.load(kafka=kafka, database=database), name)
    if as_json:
        print_json(found if name is None else found[0])
        return
    if not found:
        console_err.print("No pipeline has run with this database yet.")
        return
    print_table(
        ("pipeline", "state", "consumed", "applied", "lag", "seconds behind", "events/s"),
        [_line(pipeline) for pipeline in found],
    )
    for pipeline in found:
        if pipeline["note"]:
            # The first line: what Spark has to say may fill a page.
            note = pipeline["note"].splitlines()[0]
            console_err.print(f"{pipeline['name']}: {note}", markup=False, soft_wrap=True)
    if name is not None:
        _detail(found[0])


def _line(pipeline: dict[str, Any]) -> tuple[str | int | float, ...]:
    return (
        pipeline["name"],
        pipeline["state"],
        pipeline["consumed"],
        pipeline["applied"],
        _known(pipeline["lag"]),
        _known(pipeline["lag_seconds"]),
        round(pipeline["events_per_second"], 1),
    )


def _detail(pipeline: dict[str, Any]) -> None:
    driver = pipeline["driver"]
    if driver is not None:
        console_err.print(
            f"driver: process {driver['pid']} on {driver['host']}, since {driver['since']:%F %T %Z}"
        )
    click.echo()
    print_table(
        ("partition", "next offset", "end", "lag", "seconds behind", "trouble"),
        [
            (
                f"{part['topic']}/{part['partition']}",
                part["next_offset"],
                _known(part["end"]),
                _known(part["lag"]),
                _known(part["lag_seconds"]),
                part["trouble"] or "",
            )
            for part in pipeline["partitions"]
        ],
    )


def _known(number: float | None) -> str | int | float:
    return "?" if number is None else number
