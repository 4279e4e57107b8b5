"""Watching an operation until it is over; Ctrl-C ends the watching, never the operation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from sideline import showing
from sideline.cli.operations_views import operation_json, progress
from sideline.cli.output import Steps, console_err
from sideline.errors import PartialError, is_interrupt

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.operations import Operation

LOOK_SECONDS = 0.4
# Somebody may be about to start the driver.
DRIVER_SECONDS = 2.0
EXIT_INTERRUPTED = 130


def watch_operations(
    url: str, numbers: Sequence[int], *, app: str | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Show operations until the last one is over; exit code, and what has become of them.

    Of several, each one begins when the one before is done and nothing of it failed again.
    """
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.audit import actor  # noqa: PLC0415
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.ledger.reading import understood  # noqa: PLC0415

    ended: list[dict[str, Any]] = []
    with understood(url), reach(url, role="watch", autocommit=True) as connection:
        for place, number in enumerate(numbers):
            if place:
                _begin(url, number, numbers[place - 1], actor())
            operation = _watch(connection, number, numbers[place + 1 :], app)
            ended.append(operation_json(operation, operations.items(connection, number)))
            if operation.state != "done" or operation.failed:
                _say_rest(numbers[place + 1 :])
                return PartialError.exit_code, ended
    return 0, ended


def _begin(url: str, number: int, before: int, actor: str) -> None:
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415

    reason = f"nothing of operation {before} failed again"
    with reach(url, role="ramp") as connection:
        operations.resume(connection, number, actor=actor, reason=reason)


def _watch(connection: Connection, number: int, later: Sequence[int], app: str | None) -> Operation:
    from sideline import operations  # noqa: PLC0415 - imports psycopg

    operation = operations.find(connection, number)
    try:
        with Steps() as steps:
            operation = _show(connection, operation, steps, app)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        console_err.print(
            f"Operation {number} goes on. Watch it again: sideline ops show {number} --watch"
        )
        _say_rest(later)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    _say_end(operation)
    return operation


def _show(connection: Connection, operation: Operation, steps: Steps, app: str | None) -> Operation:
    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.cli.choosing import nothing_happens  # noqa: PLC0415
    from sideline.ledger.place import is_held  # noqa: PLC0415

    bar = steps.bar(f"{operation.kind} {operation.pipeline} ({operation.id})", operation.total)
    said, warned, looked = operation.note, False, time.monotonic() - DRIVER_SECONDS / 2
    while not operation.is_over:
        bar.reach(operation.done)
        if operation.note and operation.note != said:
            said = operation.note
            steps.say(f"     {showing.words(operation.note)}")
        if not warned and time.monotonic() - looked > DRIVER_SECONDS:
            looked = time.monotonic()
            if not is_held(connection, operation.pipeline):
                warned = True
                steps.say(f"     {nothing_happens(app)}")
        time.sleep(LOOK_SECONDS)
        operation = operations.find(connection, operation.id)
    bar.reach(operation.done)
    bar.close()
    return operation


def _say_end(operation: Operation) -> None:
    text = f"operation {operation.id} is {operation.state}: {progress(operation)}"
    if operation.note and operation.state != "done":
        text += f" ({operation.note})"
    if operation.state == "done" and not operation.failed:
        Steps().done(showing.words(text))
        return
    console_err.print(f"     {showing.words(text)}", markup=False, soft_wrap=True)
    if operation.failed:
        name = operation.pipeline
        console_err.print(f"     why: sideline parked causes {name}", markup=False)
    if operation.state in {"stopped", "paused"}:
        number = operation.id
        console_err.print(
            f"     go on: sideline ops resume {number}; give it up: sideline ops cancel {number}"
        )


def _say_rest(later: Sequence[int]) -> None:
    if later:
        console_err.print(
            f"     The next step waits as operation {later[0]}: sideline ops resume {later[0]}"
        )
