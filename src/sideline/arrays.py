"""Columns of values as PostgreSQL's array literals (pure).

psycopg writes lists too, but looks at each element several times: for a slice full of parked
events that was three quarters of the time that Python took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sideline.events import Headers

NOTHING = "{}"
# What stands for a NUL in a header's name: PostgreSQL's text holds none.
NO_NUL = "�"


def texts(values: Sequence[str | None]) -> str:
    """Texts, some of which may be missing; ``{}`` if all are: unnest() fills up with NULL."""
    if None not in values:
        return all_quoted(values)  # type: ignore[arg-type]  # no None in it
    if values.count(None) == len(values):
        return NOTHING
    return "{" + ",".join(["NULL" if value is None else quoted(value) for value in values]) + "}"


def numbers(values: Sequence[int | None]) -> str:
    """Whole numbers, some of which may be missing."""
    return "{" + str(list(values))[1:-1].replace("None", "NULL") + "}"


def blobs(values: Sequence[bytes | None]) -> str:
    """Bytes, some of which may be missing."""
    if None not in values:
        texts = map(bytes.hex, values)  # type: ignore[arg-type]  # no None in it
        return '{"\\\\x' + '","\\\\x'.join(texts) + '"}' if values else NOTHING
    return (
        "{"
        + ",".join(["NULL" if value is None else f'"\\\\x{value.hex()}"' for value in values])
        + "}"
    )


def quoted(text: str) -> str:
    """One element of an array literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def all_quoted(values: Sequence[str]) -> str:
    """Texts, none of which is missing: quoted at once, one by one only where one needs it."""
    joined = '","'.join(values)
    if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
        return '{"' + joined + '"}'
    return "{" + ",".join(map(quoted, values)) + "}"


def header_names(headers: Headers) -> str:
    """One event's header names, as an element of an array: arrays of arrays are rectangular."""
    if not headers:
        return NOTHING
    return all_quoted([name for name, _ in headers]).replace("\0", NO_NUL)


def header_values(headers: Headers) -> str:
    """The same for their values."""
    return blobs([value for _, value in headers]) if headers else NOTHING
