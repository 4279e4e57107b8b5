"""`sideline status`: progress, lag and state of pipelines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from sideline import settings, showing
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.errors import CheckError

if TYPE_CHECKING:
    from sideline.accounting import Books

TROUBLE_CHARACTERS = 300
# A copy that should have come so long ago may be lost.
LATE_MINUTES = 5
# Shown only where some partition has counted one.
RARE = frozenset({"retrying", "dead", "discarded", "duplicate"})
# A million queues that are wrong are not said a million times.
MOST_DIFFERENCES = 100


@click.command()
@click.argument("name", required=False)
@click.option(
    "--check", is_flag=True, help="Prove that the counters agree with the ledger; exit 3 if not."
)
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def status(
    *, name: str | None, check: bool, kafka: str | None, database: str | None, as_json: bool
) -> int:
    """Show progress, lag and state of all pipelines, or of one with its partitions."""
    configured = settings.load(kafka=kafka, database=database)
    if check:
        return _check(configured.require_database(), name, as_json=as_json)
    _show(configured, name, as_json=as_json)
    return 0


def _show(configured: settings.Settings, name: str | None, *, as_json: bool) -> None:
    from sideline.status import gather  # noqa: PLC0415 - imports psycopg and confluent-kafka

    found = gather(configured, name)
    if as_json:
        print_json(found if name is None else found[0])
        return
    if not found:
        console_err.print("No pipeline has run with this database yet.")
        return
    print_table(
        (
            *("pipeline", "state", "consumed", "applied", "parked", "keys aside"),
            *("lag", "seconds behind", "events/s"),
        ),
        [_line(pipeline) for pipeline in found],
    )
    for pipeline in found:
        if pipeline["note"]:
            # The first line: what Spark has to say may fill a page.
            _speak(f"{pipeline['name']}: {pipeline['note'].splitlines()[0]}")
        _mention(pipeline)
    if name is not None:
        _detail(found[0])


def _line(pipeline: dict[str, Any]) -> tuple[str | int | float, ...]:
    return (
        pipeline["name"],
        f"{pipeline['state']}, paused" if pipeline["paused"] else pipeline["state"],
        pipeline["consumed"],
        pipeline["applied"],
        pipeline["parked"],
        pipeline["aside"],
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
        (
            *("partition", "next offset", "end", "lag", "seconds behind"),
            *("parked", "keys aside", "trouble"),
        ),
        [
            (
                f"{part['topic']}/{part['partition']}",
                part["next_offset"],
                _known(part["end"]),
                _known(part["lag"]),
                _known(part["lag_seconds"]),
                part["parked"],
                part["aside"],
                _condition(part),
            )
            for part in pipeline["partitions"]
        ],
    )


def _mention(pipeline: dict[str, Any]) -> None:
    """What asks for a person: pauses, and who and why; alerts."""
    name = pipeline["name"]
    parts = [
        f"{part['topic']}/{part['partition']}" for part in pipeline["partitions"] if part["paused"]
    ]
    if pipeline["paused"] or parts:
        what = "everything" if pipeline["paused"] else ", ".join(parts)
        why = f" ({pipeline['paused_note']})" if pipeline["paused_note"] else ""
        flags = "" if pipeline["paused"] else "".join(f" --partition {part}" for part in parts)
        _speak(f"{name}: {what} is paused{why}: sideline resume {name}{flags}")
    runs = sorted({part["held_for"] for part in pipeline["partitions"] if part["held_for"]})
    if runs:
        over = "sideline reprocess APP:NAME, with --resume or --cancel, ends it"
        _speak(f"{name}: waits for run {name}@{runs[0]}; {over}")
    for waiting in pipeline["retry_topics"]:
        _speak(f"{name}: {_retrying(waiting)}")
    for box in pipeline["outbox"]:
        where = f"{box['topic']}/{box['partition']}"
        age = "" if box["age_seconds"] is None else f", the oldest for {box['age_seconds']:,.0f} s"
        why = f": {showing.short(box['trouble'], TROUBLE_CHARACTERS)}" if box["trouble"] else ""
        _speak(f"{name}: {box['records']:,} records of {where} wait to be sent{age}{why}")
    for one in pipeline["operations"]:
        failed = f", {one['failed']:,} failed again" if one["failed"] else ""
        _speak(
            f"{name}: {one['kind']} {one['state']}, {one['done']:,} of {one['total']:,} events"
            f"{failed}: sideline ops show {one['id']}"
        )
    if pipeline["alerts"]:
        alerts = "1 alert is" if pipeline["alerts"] == 1 else f"{pipeline['alerts']:,} alerts are"
        _speak(f"{name}: {alerts} open: sideline alerts {name}")


def _retrying(waiting: dict[str, Any]) -> str:
    """How many wait in a retry topic, and until when."""
    count = waiting["events"]
    events = "1 event waits" if count == 1 else f"{count:,} events wait"
    first, last = waiting["first_due_at"], waiting["last_due_at"]
    if first is None:
        return f"{events} in {waiting['topic']}"
    until = f"{first.astimezone():%F %T}"
    if last != first:
        until += f" to {last.astimezone():%F %T}"
    late = datetime.now(UTC) - first > timedelta(minutes=LATE_MINUTES)
    hint = "; whether copies are lost says `sideline topics resend`" if late else ""
    return f"{events} in {waiting['topic']}, due {until}{hint}"


def _condition(part: dict[str, Any]) -> str:
    """What keeps a partition from going on, and how long."""
    words = ["paused"] if part["paused"] else []
    if part["waits_for"]:
        older = sorted((int(number), offset) for number, offset in part["waits_for"].items())
        names = ", ".join(f"{part['topic']}/{number} at {offset}" for number, offset in older)
        words.append(f"waits until older partitions have passed {names}")
    if part["attempts"]:
        event = "" if part["stuck_at"] is None else f" at offset {part['stuck_at']}"
        due = part["waits_until"]
        again = f", again at {due.astimezone():%T}" if due is not None else ""
        words.append(f"attempt {part['attempts']}{event}{again}")
    if part["trouble"]:
        words.append(showing.short(part["trouble"], TROUBLE_CHARACTERS))
    return ": ".join(words)


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)


def _check(database: str, name: str | None, *, as_json: bool) -> int:
    """Print the accounts; exit 3 where they do not balance."""
    from sideline import accounting  # noqa: PLC0415 - imports psycopg

    found = accounting.check(database, name)
    if as_json:
        ok = not any(books.differences for books in found)
        print_json({"ok": ok, "pipelines": found})
    else:
        _print_books(found)
    return CheckError.exit_code if any(books.differences for books in found) else 0


def _print_books(found: list[Books]) -> None:
    from sideline.status import COUNTERS  # noqa: PLC0415 - imports psycopg

    accounts = [account for books in found for account in books.partitions]
    counters = [
        counter
        for counter in COUNTERS
        if counter not in RARE or any(getattr(account, counter) for account in accounts)
    ]
    differences = [one for books in found for one in books.differences]
    wrong = {(one.pipeline, one.partition) for one in differences}
    rows = [
        (
            books.pipeline,
            account.name,
            *(getattr(account, counter) for counter in counters),
            "differs" if (books.pipeline, account.name) in wrong else "ok",
        )
        for books in found
        for account in books.partitions
    ]
    if not rows:
        _speak("No pipeline has run with this database yet.")
        return
    print_table(("pipeline", "partition", *counters[:-1], "keys aside", "books"), rows)
    for one in differences[:MOST_DIFFERENCES]:
        _speak(f"{one.pipeline} {one.partition}: {one.message}: {one.counted:,} and {one.found:,}")
    if len(differences) > MOST_DIFFERENCES:
        _speak(f"... and {len(differences) - MOST_DIFFERENCES:,} more: --json has all of them.")


def _known(number: float | None) -> str | int | float:
    return "?" if number is None else number
