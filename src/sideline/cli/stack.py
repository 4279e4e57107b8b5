"""`sideline stack`: embedded Kafka and PostgreSQL in ./.sideline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sideline.cli.output import Steps, console_err, json_option, print_json, print_table
from sideline.errors import CheckError, NotFoundError
from sideline.stack import Stack, StackInfo
from sideline.stack.embedded import MOST_BROKERS
from sideline.stack.ports import LOOPBACK
from sideline.stack.state import DIRECTORY, POSTGRES, Service

F = TypeVar("F", bound=Callable[..., Any])


def _directory_option(command: F) -> F:
    return click.option(
        "--directory",
        type=click.Path(file_okay=False, path_type=Path),
        default=DIRECTORY,
        show_default="./.sideline",
        help="Where the stack keeps its data, logs and state.",
    )(command)


@click.group()
def stack() -> None:
    """Embedded Kafka and PostgreSQL, on loopback; their state is in ./.sideline."""


@stack.command()
@click.option(
    "--brokers",
    type=click.IntRange(1, MOST_BROKERS),
    help="How many Kafka brokers; 3 replicate three times.  [default: as before, at first 1]",
)
@click.option("--fresh", is_flag=True, help="Delete everything in the stack before.")
@_directory_option
@json_option
def up(*, brokers: int | None, fresh: bool, directory: Path, as_json: bool) -> None:
    """Start what is not running, and wait until it is ready.

    Data of an earlier time are there again. The first time, the broker is downloaded.
    """
    with Steps() as steps:
        info = Stack(directory).up(brokers=brokers, fresh=fresh, progress=steps)
    _show(info, as_json=as_json)
    if not as_json and directory == DIRECTORY:
        console_err.print("Commands in this directory use it unless told otherwise.")


@stack.command()
@_directory_option
@json_option
def down(*, directory: Path, as_json: bool) -> None:
    """Stop Kafka and PostgreSQL; data stay for the next time."""
    with Steps() as steps:
        stopped = Stack(directory).down(progress=steps)
    if as_json:
        print_json({"stopped": stopped})
    else:
        console_err.print("Stopped." if stopped else "Nothing was running.")


@stack.command()
@_directory_option
@json_option
def status(*, directory: Path, as_json: bool) -> int:
    """Show what should be running.

    Exit code 0: all of it is; 3: a part has ended by itself; 4: there is no stack up.
    """
    info = Stack(directory).status()
    if info is None:
        raise NotFoundError(f"no stack is up in {directory}.", hint="Start one: sideline stack up")
    _show(info, as_json=as_json)
    for service in info.dead:
        problem = info.problem(service)
        console_err.print(f"sideline: {problem.message}\n  {problem.hint}", markup=False)
    if info.dead:
        console_err.print("Start what is missing: sideline stack up")
        return CheckError.exit_code
    return 0


def _show(info: StackInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(info.as_dict())
        return
    print_table(
        ("service", "version", "state", "pid", "address"),
        [_row(info, service) for service in info.services],
    )


def _row(info: StackInfo, service: Service) -> tuple[str, ...]:
    database = service.name == POSTGRES
    return (
        service.name,
        info.versions.get(POSTGRES if database else "kafka", ""),
        "up" if service.alive else "dead",
        str(service.process.pid) if service.process and service.alive else "",
        info.database_address if database else f"{LOOPBACK}:{service.port}",
    )
