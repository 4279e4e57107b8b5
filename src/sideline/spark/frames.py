"""The ledger as DataFrames: what waits, what ever failed, how far a pipeline is."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions
from pyspark.sql.types import StructType

from sideline import errors
from sideline import settings as settings_module
from sideline.engine import secrets
from sideline.engine.session import is_connect
from sideline.errors import ConfigurationError, SidelineError, UsageError
from sideline.ledger import reading
from sideline.ledger.connection import place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sideline.pipeline import Pipeline
    from sideline.settings import Settings

Decode = str | StructType | None
# An error of ours, in the words of the process that ran into it.
_OURS = re.compile(r"sideline\.errors\.(\w+): (.+)")


def parked(
    spark: SparkSession,
    pipeline: str | Pipeline,
    *,
    decode: Decode = None,
    payload: bool = True,
    settings: Settings | None = None,
) -> DataFrame:
    """Events that wait now, one row each.

    ``decode="text"`` adds ``key_text`` and ``value_text`` (null where the bytes are not UTF-8);
    ``decode="json"`` also ``value_json``, a VARIANT (null where it is not JSON); a StructType makes
    ``value_json`` a struct of that type. ``payload=False`` leaves value and headers where they are.

    Read anew by every action, in ranges; see docs/dataframes.md for what holds between them.
    """
    _check(decode, payload=payload)
    return _decoded(_load(spark, "parked", pipeline, settings, payload=payload), decode)


def history(
    spark: SparkSession,
    pipeline: str | Pipeline,
    *,
    decode: Decode = None,
    payload: bool = True,
    settings: Settings | None = None,
) -> DataFrame:
    """Every event that the ledger knows, in all states, as far as retention keeps them.

    The columns, and what ``decode`` and ``payload`` do, are those of `parked`.
    """
    _check(decode, payload=payload)
    return _decoded(_load(spark, "history", pipeline, settings, payload=payload), decode)


def progress(
    spark: SparkSession, pipeline: str | Pipeline, *, settings: Settings | None = None
) -> DataFrame:
    """How far the pipeline is, one row a partition, with its accounts."""
    return _load(spark, "progress", pipeline, settings, payload=False)


def _check(decode: Decode, *, payload: bool) -> None:
    if decode not in {None, "text", "json"} and not isinstance(decode, StructType):
        message = f'decode is {decode!r}; it is "text", "json" or a StructType.'
        raise UsageError(message)
    if decode is not None and not payload:
        raise UsageError("decode= has nothing to decode with payload=False.")


def _decoded(frame: DataFrame, decode: Decode) -> DataFrame:
    if decode is None:
        return frame
    text = functions.try_validate_utf8
    frame = frame.withColumns({"key_text": text("key"), "value_text": text("value")})
    if decode == "json":
        return frame.withColumn("value_json", functions.try_parse_json("value_text"))
    if isinstance(decode, StructType):
        return frame.withColumn("value_json", functions.from_json("value_text", decode))
    return frame


def _load(
    spark: SparkSession,
    table: str,
    pipeline: str | Pipeline,
    settings: Settings | None,
    *,
    payload: bool,
) -> DataFrame:
    if importlib.util.find_spec("pyarrow") is None:
        message = "DataFrames of the ledger need pyarrow, which is not installed."
        raise ConfigurationError(message, hint="Install sideline[dataframes].")
    from sideline.spark.source import NAME, LedgerSource  # noqa: PLC0415 - slow to import

    name, sink = (pipeline, None) if isinstance(pipeline, str) else (pipeline.name, pipeline.sink)
    options = {"pipeline": name, "table": table, "payload": str(payload).lower()}
    if not is_connect(spark):
        options |= _way(settings or settings_module.load(), name, sink)
    elif settings is not None or getattr(sink, "url", None):
        message = "a Connect session finds the ledger by the settings of its server, not by these."
        hint = "Set SIDELINE_DATABASE where the server runs, and leave settings= out."
        raise ConfigurationError(message, hint=hint)
    spark.dataSource.register(LedgerSource)
    try:
        frame = spark.read.format(NAME).options(**options).load()
        # A Connect session would find out at the first action only.
        _ = frame.schema
    except PySparkException as error:
        raise _ours(error) or error from error
    return frame


def _way(settings: Settings, name: str, sink: object) -> dict[str, str]:
    """How tasks find the database. Whether it has the pipeline is asked before Spark is."""
    database = settings.database_for(sink)
    with reading.opened(database, role="dataframe") as connection:
        reading.waiting(connection, name)
    kafka = tuple(sorted(settings.kafka_client().items())) if settings.kafka else None
    return {"access": str(_kept(database, kafka)), "database": place(database)}


@functools.cache
def _kept(database: str, kafka: tuple[tuple[str, Any], ...] | None) -> Path:
    """The file of addresses and passwords: as long as this process, for DataFrames are lazy."""
    path = secrets.write(database, None if kafka is None else dict(kafka))
    owner = os.getpid()

    def forget() -> None:
        # A fork of this process ends earlier.
        if os.getpid() == owner and path.exists():
            secrets.remove(path)

    atexit.register(forget)
    return path


def _ours(error: PySparkException) -> SidelineError | None:
    """What one of our own processes said, without what Spark put around it."""
    found = _OURS.search(str(error))
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not isinstance(kind, type) or not issubclass(kind, SidelineError):
        return None
    return kind(found[2].strip())
