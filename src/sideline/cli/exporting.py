"""Parked events as JSON lines that can be published again, on stdout or in a file."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click
import orjson

from sideline import showing
from sideline.cli.output import Steps
from sideline.errors import RefusedError
from sideline.views import Exported


def export_line(event: Exported) -> bytes:
    """An event as a line of an export: its record exactly, and why it is there."""
    data = {
        "pipeline": event.pipeline,
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.offset,
        "timestamp_ms": event.timestamp_ms,
        "key": _base64(event.key),
        "value": _base64(event.value),
        "headers": [[name, _base64(value)] for name, value in event.headers],
        "why": event.why,
        "error": event.error,
        "message": event.message,
        "cause": event.fingerprint,
        "generation": event.generation,
        "parked_at": event.parked_at,
    }
    text = orjson.dumps(data, option=orjson.OPT_UTC_Z).decode()
    return showing.json_text(text).encode() + b"\n"


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def write(batches: Iterator[list[Exported]], file: IO[bytes] | None, total: int | None) -> int:
    """Write the events, to stdout or a file, and say how far it is; how many there were."""
    count = 0
    # A bar between the lines of a terminal would be in nobody's interest.
    quiet = file is None and sys.stdout.isatty()
    with Steps() as steps:
        bar = None if quiet else steps.bar("export", total or 0)
        for batch in batches:
            lines = b"".join(map(export_line, batch))
            if file is None:
                click.echo(lines, nl=False)
            else:
                file.write(lines)
            count += len(batch)
            if bar is not None:
                bar.reach(count)
        if bar is not None:
            bar.close()
    return count


@contextmanager
def written(out: Path | None, *, force: bool) -> Iterator[IO[bytes] | None]:
    """The file, which appears under its name only when it is complete."""
    if out is None:
        yield None
        return
    # Through a link, to where it leads.
    out = out.resolve()
    _refuse_overwriting(out, force=force)
    try:
        number, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        message = f"{out} cannot be written: {error.strerror}."
        raise RefusedError(message, hint="Name another file.") from error
    part = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _refuse_overwriting(out, force=force)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _refuse_overwriting(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_file():
        message = f"{out} is not a file."
        raise RefusedError(message, hint="Name a file, or leave --out away to write to stdout.")
    if out.exists() and not force:
        message = f"there is a file {out} already."
        raise RefusedError(message, hint="Name another one, or use --force.")
