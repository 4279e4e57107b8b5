"""The ledger as a data source of Spark: read by the tasks themselves, range by range.

Nothing passes through the driver but where ranges begin and end. What a task needs to reach the
database is found on its own host, as every worker of ours finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from sideline.engine import secrets
from sideline.ledger import contents, reading
from sideline.ledger.sql import queries
from sideline.spark import tables
from sideline.views import Held

if TYPE_CHECKING:
    import pyarrow as pa

    from sideline.engine.worker import Access
    from sideline.ledger.connection import Connection

NAME = "sideline"
Edge = tuple[Any, ...]
Row = dict[str, Any]


class Range(InputPartition):
    """Rows behind one edge, up to another one; None: from the beginning, to the end."""

    def __init__(self, after: Edge | None = None, until: Edge | None = None) -> None:
        self.after = after
        self.until = until


class LedgerSource(DataSource):
    """``spark.read.format("sideline")``; people come through `sideline.spark.parked` and others."""

    @classmethod
    def name(cls) -> str:
        """As Spark knows it."""
        return NAME

    def schema(self) -> str:
        """Columns with their types; a pipeline that nobody knows is noticed here."""
        wanted = Wanted(self.options)
        with wanted.opened() as connection:
            reading.waiting(connection, wanted.pipeline)
        return tables.ddl(wanted.columns)

    def reader(self, schema: object) -> LedgerReader:  # noqa: ARG002 - the one that `schema` said
        """What plans and reads."""
        return LedgerReader(Wanted(self.options))


class Wanted:
    """What is read, and how the database is found: names and places, no secrets."""

    def __init__(self, options: Any) -> None:  # noqa: ANN401 - Spark's dictionary that ignores case
        self.pipeline: str = options["pipeline"]
        self.table: str = options["table"]
        self.payload = options.get("payload", "true") == "true"
        self._access: str | None = options.get("access")
        self._database: str | None = options.get("database")

    @property
    def columns(self) -> tuple[tables.Column, ...]:
        """Of the DataFrame."""
        return tables.columns(self.table, payload=self.payload)

    def access(self) -> Access:
        """Addresses and passwords, as this host knows them."""
        return secrets.find(self._access, self._database, needs_kafka=False)

    def opened(self) -> Any:  # noqa: ANN401 - a context manager that gives a Connection
        """The ledger: one snapshot."""
        return reading.opened(self.access().database, role=f"dataframe {self.pipeline}")


class LedgerReader(DataSourceReader):
    """Divides a table into ranges, and reads one of them in one snapshot."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def partitions(self) -> list[InputPartition]:
        """Ranges of about as many rows each."""
        bounds = tables.TABLES[self._wanted.table].bounds
        if bounds is None:
            return [Range()]
        named = {"pipeline": self._wanted.pipeline, "size": tables.RANGE_ROWS}
        with self._wanted.opened() as connection:
            edges = [tuple(row) for row in connection.execute(queries()[bounds], named)]
        begins, ends = [None, *edges], [*edges, None]
        return [Range(after, until) for after, until in zip(begins, ends, strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range."""
        assert isinstance(partition, Range)  # noqa: S101 - one that `partitions` made
        wanted = self._wanted
        access = wanted.access()
        with reading.opened(access.database, role=f"dataframe {wanted.pipeline}") as connection:
            connection.execute("set local time zone 'UTC'")
            for rows in _pages(connection, wanted, partition):
                if wanted.payload and wanted.table != "progress":
                    _complete(connection, access, wanted.pipeline, rows)
                yield tables.batch(wanted.columns, rows)


def _pages(connection: Connection, wanted: Wanted, part: Range) -> Iterator[list[Row]]:
    """The rows of a range, a bounded number of bytes at a time."""
    named = {
        "pipeline": wanted.pipeline,
        "payload": wanted.payload,
        "first": part.after is None,
        "last": part.until is None,
        **{f"after_{number}": value for number, value in enumerate(part.after or _NOWHERE)},
        **{f"until_{number}": value for number, value in enumerate(part.until or _NOWHERE)},
    }
    query = queries()[tables.TABLES[wanted.table].query]
    with connection.cursor(name="frame", binary=True, row_factory=dict_row) as cursor:
        cursor.execute(query, named)
        size = tables.FIRST_PAGE_ROWS
        while rows := cursor.fetchmany(size):
            yield rows
            size = tables.page_rows(len(rows), sum(map(_bytes, rows)))


# As many as the longest edge has values.
_NOWHERE: Edge = (None, None, None, None)


def _bytes(row: Row) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, bytes | str))


def _complete(connection: Connection, access: Access, pipeline: str, rows: list[Row]) -> None:
    """Add the bytes that are not in the ledger, and say of each event whether all are there."""
    away = {_held(row): row for row in rows if row["held_in"] != "ledger"}
    waiting = [held for held, row in away.items() if row["state"] == "parked" and access.kafka]
    found = contents.fetch(connection, access.kafka, pipeline, waiting) if waiting else {}
    for row in rows:
        content = found.get(_held(row)) if row["held_in"] != "ledger" else None
        row["complete"] = row["erased_at"] is None and (row["held_in"] == "ledger" or bool(content))
        if content is not None:
            row["value"] = content.value
            row["header_names"] = [name for name, _ in content.headers]
            row["header_values"] = [data for _, data in content.headers]


def _held(row: Row) -> Held:
    return Held(*(row[name] for name in Held._fields))
