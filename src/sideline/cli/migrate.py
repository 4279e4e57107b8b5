"""`sideline migrate`: the ledger's tables, made or brought up to date."""

from __future__ import annotations

import click

from sideline import settings
from sideline.cli.output import console_err, json_option, print_json
from sideline.errors import RefusedError


@click.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print the script for a DBA; change nothing.")
@click.option(
    "--since", type=click.IntRange(0), default=0, help="With --sql: the version a database has."
)
@click.option("--grant-to", metavar="ROLE", help="Let this role run pipelines; it needs no DDL.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def migrate(
    *, as_sql: bool, since: int, grant_to: str | None, database: str | None, as_json: bool
) -> None:
    """Create or upgrade the schema 'sideline' in the sink's database."""
    from sideline.ledger import schema  # noqa: PLC0415 - imports psycopg

    if as_sql:
        click.echo(schema.script(since=since, grant_to=grant_to), nl=False)
        return
    import psycopg  # noqa: PLC0415

    from sideline.ledger.connection import reach  # noqa: PLC0415

    found = settings.load(database=database)
    with reach(found.require_database(), role="migrate") as connection:
        try:
            applied = schema.migrate(connection)
            if grant_to is not None:
                schema.grant(connection, grant_to)
        except psycopg.errors.InsufficientPrivilege as error:
            message = f"this role may not do that: {error.diag.message_primary}."
            hint = "Run it as the database's owner, or give `sideline migrate --sql` to your DBA."
            raise RefusedError(message, hint=hint) from error
        except psycopg.errors.UndefinedObject as error:
            message = f"{error.diag.message_primary}."
            raise RefusedError(message, hint="Create the role first.") from error
        version = schema.version(connection)
    if as_json:
        print_json({"version": version, "applied": [step.name for step in applied]})
        return
    if applied:
        names = ", ".join(f"{step.number:04d} {step.name}" for step in applied)
        console_err.print(f"applied: {names}; the ledger is of version {version} now.")
    else:
        console_err.print(f"the ledger is of version {version} already; nothing to do.")
