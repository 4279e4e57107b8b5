"""What the ledger's DataFrames hold: their columns, and how rows become Arrow (no Spark here)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.status import COUNTERS

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of one task: a million are forty tasks.
RANGE_ROWS = 25_000
# What a task holds in memory at a time.
PAGE_ROWS = 2_000
PAGE_BYTES = 8 * 1024 * 1024
FIRST_PAGE_ROWS = 64
# Beyond the year 9999 no clock of Python or Spark shows it; timestamp_ms is always exact.
_MOST_MS = 253_402_300_800_000


class Column(NamedTuple):
    """A column, and its type in Spark's words."""

    name: str
    kind: str


HEADERS = "array<struct<name:string,value:binary>>"
# Only there when payloads are asked for.
PAYLOAD = (Column("value", "binary"), Column("headers", HEADERS), Column("complete", "boolean"))
EVENTS = (
    Column("pipeline", "string"),
    Column("topic", "string"),
    Column("partition", "int"),
    Column("offset", "bigint"),
    Column("incarnation", "int"),
    Column("state", "string"),
    Column("why", "string"),
    Column("place", "bigint"),
    Column("queue", "bigint"),
    Column("key", "binary"),
    Column("timestamp", "timestamp"),
    Column("timestamp_ms", "bigint"),
    Column("stage", "string"),
    Column("error", "string"),
    Column("message", "string"),
    Column("traceback", "string"),
    Column("fingerprint", "string"),
    Column("handler_version", "string"),
    Column("attempts", "int"),
    Column("generation", "int"),
    Column("parked_at", "timestamp"),
    Column("updated_at", "timestamp"),
    Column("held_in", "string"),
    Column("erased_at", "timestamp"),
)
PROGRESS = (
    Column("pipeline", "string"),
    Column("topic", "string"),
    Column("partition", "int"),
    Column("next_offset", "bigint"),
    *(Column(name, "bigint") for name in COUNTERS),
    Column("event_at", "timestamp"),
    Column("updated_at", "timestamp"),
    Column("paused", "boolean"),
    Column("attempts", "int"),
    Column("due_at", "timestamp"),
    Column("trouble", "string"),
)


class Table(NamedTuple):
    """A DataFrame of the ledger: which query, and how it is divided among tasks."""

    columns: tuple[Column, ...]
    query: str
    bounds: str | None = None
    """Finds where ranges end; None: it is small."""


TABLES = {
    "parked": Table(EVENTS, "frame_parked", "frame_parked_bounds"),
    "history": Table(EVENTS, "frame_history", "frame_history_bounds"),
    "progress": Table(PROGRESS, "frame_progress"),
}


def columns(table: str, *, payload: bool) -> tuple[Column, ...]:
    """The columns of a DataFrame."""
    found = TABLES[table].columns
    return found + PAYLOAD if payload and found is EVENTS else found


def ddl(some: Iterable[Column]) -> str:
    """The schema, as Spark reads it."""
    return ", ".join(f"`{column.name}` {column.kind}" for column in some)


def batch(some: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as Arrow, exactly: 64-bit offsets, bytes, times to the microsecond in UTC."""
    import pyarrow as pa  # noqa: PLC0415 - only workers need it

    arrays = []
    names = []
    for column in some:
        kind = _arrow(column.kind)
        read = _READERS.get(column.name)
        values = [row[column.name] if read is None else read(row) for row in rows]
        arrays.append(pa.array(values, kind))
        names.append(column.name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _timestamp(row: Mapping[str, Any]) -> int | None:
    """Microseconds; null where the record has none."""
    at = row["timestamp_ms"]
    return at * 1000 if 0 <= at < _MOST_MS else None


def _headers(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(row["header_names"], row["header_values"], strict=True)
    return [{"name": name, "value": value} for name, value in pairs]


_READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "timestamp": _timestamp,
    "headers": _headers,
}


def _arrow(kind: str) -> pa.DataType:
    import pyarrow as pa  # noqa: PLC0415 - only workers need it

    kinds = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        HEADERS: pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])),
    }
    return kinds[kind]


def page_rows(rows: int, size_bytes: int) -> int:
    """How many rows the next page may have, after one of this size."""
    return max(1, min(PAGE_ROWS, PAGE_BYTES * rows // max(size_bytes, 1)))
