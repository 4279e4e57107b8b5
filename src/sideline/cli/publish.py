"""`sideline publish`: JSON lines into a topic."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from sideline import lines, showing
from sideline.cli.output import Steps, console_err, json_option, print_json
from sideline.errors import (
    NotDeliveredError,
    NotFoundError,
    PartialError,
    SidelineError,
    UsageError,
)
from sideline.lines import LONGEST_LINE, BadLineError, Line

if TYPE_CHECKING:
    from sideline.deliveries import Handle
    from sideline.publisher import Publisher

Parse = Callable[[bytes], Line]
Numbered = Iterator[tuple[int, Line]]

_STDIN = "-"
_SHOWN = 5
# Between two looks at what has arrived.
_LOOK_EVERY = 500
# Waits shorter than this are not worth a call.
_PACE_SECONDS = 0.005


@click.command()
@click.argument("topic")
@click.argument("file", default=_STDIN)
@click.option("--values", is_flag=True, help="Each line is a value; its bytes are the record's.")
@click.option("--key-field", metavar="NAME", help="The field of a value that is its key.")
@click.option("--keyless", is_flag=True, help="Records may lack a key: no order is needed.")
@click.option("--keep-timestamps", is_flag=True, help="Of an export; otherwise it is now.")
@click.option("--rate", type=click.FloatRange(0.001, 1e7), help="Records a second, at most.")
@click.option("--from-line", type=click.IntRange(1), default=1, help="Go on at this line.")
@click.option("--dry-run", is_flag=True, help="Check topic and lines; publish nothing.")
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@json_option
def publish(  # noqa: PLR0913 - one parameter an option
    *,
    topic: str,
    file: str,
    values: bool,
    key_field: str | None,
    keyless: bool,
    keep_timestamps: bool,
    rate: float | None,
    from_line: int,
    dry_run: bool,
    kafka: str | None,
    as_json: bool,
) -> None:
    """Publish lines of JSON: those that `sideline parked export` writes, or plain values.

    FILE is - for stdin, which is the default. A file is checked as a whole before its first
    record is published.
    """
    from sideline.publisher import Publisher  # noqa: PLC0415 - imports confluent-kafka

    parse = _parser(values=values, key_field=key_field, keyless=keyless)
    plain = values or key_field is not None
    if plain and keep_timestamps:
        raise UsageError("values have no timestamp of their own.", hint="Drop --keep-timestamps.")
    # A record that is passed on stays what it was: no header is added.
    with _opened(file) as source, Publisher(kafka=kafka, keyless=keyless, ids=plain) as publisher:
        publisher.look(topic)
        work = Work(publisher, topic, keep_timestamps=keep_timestamps, rate=rate)
        # What can be read only once cannot be looked at before.
        whole = file != _STDIN and source.seekable()
        checked = _check(source, file, parse, from_line) if dry_run or whole else None
        if not dry_run:
            _publish(work, _parsed(source, parse, from_line), file, checked)
    shown = {"topic": topic, "dry_run": dry_run, "checked": checked, **work.summary()}
    if as_json:
        print_json(shown)
        return
    text = (
        f"{checked:,} lines are fit to be published to {topic}; nothing was published."
        if dry_run
        else f"{topic}: {work.words()}"
    )
    console_err.print(showing.words(text), markup=False, soft_wrap=True)


@dataclass(slots=True)
class Work:
    """Records on their way, and which of them have arrived."""

    publisher: Publisher
    topic: str
    keep_timestamps: bool
    rate: float | None
    published: int = 0
    failed: list[int] = field(default_factory=list)
    """Lines."""
    last: int = 0
    """The last line that was handed over."""
    reached: int = 0
    """The last line that was tried."""
    reason: str | None = None
    began: float = field(default_factory=time.monotonic)
    under_way: deque[tuple[int, Handle]] = field(default_factory=deque)
    handed: int = 0

    def give(self, number: int, line: Line) -> None:
        """Hand a record over, not faster than asked."""
        self.reached = number
        if self.rate is not None:
            self._pace(self.rate)
        handle = self.publisher.publish(
            self.topic,
            line.value,
            key=line.key,
            headers=line.headers,
            timestamp=line.timestamp_ms if self.keep_timestamps else None,
        )
        self.handed += 1
        self.last = number
        self.under_way.append((number, handle))

    def look(self) -> None:
        """Count what has arrived."""
        waiting = self.under_way
        while waiting and waiting[0][1].done:
            number, handle = waiting.popleft()
            if handle.error is None:
                self.published += 1
            else:
                self.reason = self.reason or handle.error
                self.failed.append(number)

    def finish(self) -> None:
        """Wait for everything; what failed is in ``failed``, by line."""
        try:
            self.publisher.flush()
        except NotDeliveredError:
            # Told by line, below.
            self.look()
        self.look()

    def summary(self) -> dict[str, Any]:
        """In numbers."""
        seconds = round(time.monotonic() - self.began, 3)
        return {
            "published": self.published,
            "failed": len(self.failed),
            "last_line": self.last,
            "seconds": seconds,
        }

    def words(self) -> str:
        """In words."""
        rate = self.published / max(time.monotonic() - self.began, 1e-3)
        records = "1 record" if self.published == 1 else f"{self.published:,} records"
        return f"{records} published, {rate:,.0f}/s; the last line was {self.last:,}."

    def _pace(self, rate: float) -> None:
        ahead = self.began + self.handed / rate - time.monotonic()
        if ahead > _PACE_SECONDS:
            self.look()
            time.sleep(ahead)


def _publish(work: Work, records: Numbered, name: str, total: int | None) -> None:
    """Publish until the end, a line that cannot be, or the first record that does not arrive."""
    trouble: BadLineError | None = None
    work.began = time.monotonic()
    with Steps() as steps:
        bar = steps.bar("publish", total or 0)
        try:
            for number, line in records:
                work.give(number, line)
                if not work.handed % _LOOK_EVERY:
                    work.look()
                    bar.reach(work.published)
                    if work.failed:
                        break
        except BadLineError as error:
            trouble = error
        except SidelineError as error:
            # Of one record: too large, or a publisher that cannot go on.
            trouble = BadLineError(f"line {work.reached:,} was not taken: {error.message}")
        except BaseException:
            work.finish()
            console_err.print(showing.words(f"{work.topic}: {work.words()}"), markup=False)
            raise
        work.finish()
        bar.reach(work.published)
        bar.close()
    if work.failed:
        raise _not_delivered(work)
    if trouble is not None:
        raise _stopped(work, name, trouble)


def _not_delivered(work: Work) -> PartialError:
    some = ", ".join(map(str, work.failed[:_SHOWN]))
    more = f" and {len(work.failed) - _SHOWN:,} more" if len(work.failed) > _SHOWN else ""
    message = (
        f"{work.topic}: {work.published:,} records published, {len(work.failed):,} not delivered "
        f"(line {some}{more}): {work.reason}."
    )
    hint = f"All other lines up to {work.last:,} arrived. Then go on with --from-line."
    return PartialError(message, hint=hint)


def _stopped(work: Work, name: str, trouble: BadLineError) -> UsageError | PartialError:
    """Nothing was published before the bad line, or something was."""
    if not work.published:
        return UsageError(f"{_place(name)}{_bare(trouble)}; nothing was published.", hint=_HINT)
    records = "1 record" if work.published == 1 else f"{work.published:,} records"
    message = f"{_place(name)}{_bare(trouble)}; {records} before it were published to {work.topic}."
    hint = f"Mend it, and go on with --from-line {work.last + 1}."
    return PartialError(message, hint=hint)


_HINT = (
    "Without an option, lines are those of `sideline parked export`. For plain JSON values give\n"
    "--key-field NAME, or --values --keyless."
)


def _bare(trouble: BadLineError) -> str:
    return str(trouble).rstrip(".")


def _place(name: str) -> str:
    return "" if name == _STDIN else f"{name}: "


def _parser(*, values: bool, key_field: str | None, keyless: bool) -> Parse:
    if key_field is not None:
        if keyless:
            message = "--key-field names the key, --keyless says that there is none."
            raise UsageError(message, hint="Leave one of the two out.")
        return lambda line: lines.value(line, key_field=key_field)
    if values and not keyless:
        message = "values need a key: without one the order of events is lost."
        hint = "Give --key-field NAME, or say that order does not matter: --keyless."
        raise UsageError(message, hint=hint)
    if values:
        return lambda line: lines.value(line, key_field=None)
    return lambda line: lines.record(line, keyless=keyless)


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    if name == _STDIN:
        yield sys.stdin.buffer
        return
    try:
        source = Path(name).open("rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {name}.", hint="Use - for stdin.") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from None
    with source:
        yield source


def _check(source: IO[bytes], name: str, parse: Parse, from_line: int) -> int:
    """Read it to its end, and refuse it as a whole if a line cannot be published."""
    count, bad = 0, list[str]()
    numbers = 0
    for number, text in _numbered(source, from_line):
        count += 1
        try:
            parse(text)
        except BadLineError as error:
            numbers += 1
            bad += [f"line {number:,} {error}"] if len(bad) < _SHOWN else []
    if bad:
        more = f"; and {numbers - len(bad):,} more" if numbers > len(bad) else ""
        message = f"{_place(name)}{'; '.join(bad)}{more}; nothing was published."
        raise UsageError(message, hint=_HINT)
    if source.seekable():
        source.seek(0)
    return count


def _parsed(source: IO[bytes], parse: Parse, from_line: int) -> Numbered:
    for number, text in _numbered(source, from_line):
        try:
            yield number, parse(text)
        except BadLineError as error:
            raise BadLineError(f"line {number:,} {error}") from None


def _numbered(source: IO[bytes], from_line: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; one without an end is not read to it."""
    number = 0
    while text := source.readline(LONGEST_LINE + 2):
        number += 1
        if number >= from_line and text.strip():
            yield number, text.strip()
        while not text.endswith(b"\n") and (text := source.readline(LONGEST_LINE)):
            # The rest of one that is refused already.
            pass
