"""`sideline erase`: the bytes of a key's events, gone for good."""

from __future__ import annotations

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json
from sideline.errors import UsageError


@click.command()
@click.option("--pipeline", metavar="NAME", required=True, help="Whose events.")
@click.option("--key", metavar="TEXT", help="The record's key.")
@click.option("--key-hex", metavar="HEX", help="The same for a key of any bytes.")
@click.option("--topic", metavar="TOPIC", help="Only of this topic.")
@click.option("--reason", metavar="TEXT", required=True, help="Why; without the person's name.")
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def erase(  # noqa: PLR0913 - one parameter an option
    *,
    pipeline: str,
    key: str | None,
    key_hex: str | None,
    topic: str | None,
    reason: str,
    execute: bool,
    database: str | None,
    as_json: bool,
) -> None:
    """Erase key, value and headers of all events of a key that the ledger has, for good.

    Refused while one of them waits: it could never be applied. Kafka's own topics are not
    touched.
    """
    from sideline.ledger import audit, erasing, reading  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415

    wanted, why = _key(key, key_hex), audit.reason(reason)
    url = settings.load(database=database).require_database()
    with reading.understood(url), reach(url, role="erase") as connection:
        found = erasing.find(connection, pipeline, wanted, topic)
        if found.waiting:
            raise erasing.still_waiting(pipeline, found.waiting)
        erased = 0
        if execute and (found.events or found.causes):
            erased = erasing.erase(
                connection, pipeline, wanted, topic=topic, actor=audit.actor(), reason=why
            )
    if as_json:
        print_json(
            {
                "pipeline": pipeline,
                "events": found.states,
                "erased_before": found.erased,
                "causes": found.causes,
                "erased": erased,
                "executed": execute,
            }
        )
        return
    if not found.events and not found.causes:
        _speak(f"The ledger has no event of that key in pipeline {pipeline}.")
        return
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(found.states.items()))
    _speak(f"Events of that key in pipeline {pipeline}: {counts or 'none'}.")
    if found.causes:
        _speak(f"Causes of failures that quote an event of that key: {found.causes:,}.")
    if execute:
        _speak(f"Erased for good: {erased:,}. What Kafka has of them is still there.")
    else:
        _speak("Key, value, headers and error texts would be gone; nothing brings them back.")
        _speak("Nothing is changed yet: --execute does it.")


def _key(text: str | None, in_hex: str | None) -> bytes:
    if (text is None) == (in_hex is None):
        raise UsageError("one key is needed.", hint="Write --key TEXT or --key-hex HEX.")
    if text is not None:
        try:
            return text.encode()
        except UnicodeEncodeError:
            message = "--key is not text."
            raise UsageError(message, hint="Write its bytes with --key-hex.") from None
    digits = (in_hex or "").removeprefix("0x")
    try:
        return bytes.fromhex(digits)
    except ValueError:
        message = f"--key-hex {showing.words(in_hex or '')} is not hexadecimal."
        raise UsageError(message, hint="Write it as `sideline parked` prints it.") from None


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
