"""`sideline config`: what is configured, and where it came from."""

from __future__ import annotations

import click

from sideline import settings
from sideline.cli.output import json_option, print_json, print_table


@click.group(no_args_is_help=True)
def config() -> None:
    """What is configured, and where it came from."""


@config.command()
@click.option("--origin", is_flag=True, help="Also say where each setting came from.")
@json_option
def show(*, origin: bool, as_json: bool) -> None:
    """Show every setting; passwords are masked."""
    found = settings.load()
    shown = found.shown()
    if as_json:
        print_json(
            {name: {"value": value, "origin": found.origins[name]} for name, value in shown.items()}
            if origin
            else shown
        )
        return
    rows = [(name, value or "not set", found.origins[name]) for name, value in shown.items()]
    if origin:
        print_table(("setting", "value", "origin"), rows)
    else:
        print_table(("setting", "value"), [row[:2] for row in rows])
