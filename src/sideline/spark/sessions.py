"""A SparkSession that is ready: Kafka connector included, and right for pipelines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sideline.engine import session as sessions
from sideline.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Connector = Literal["fetch", "cluster"]
CONNECTORS = ("fetch", "cluster")


def session(
    *,
    master: str | None = None,
    name: str = "sideline",
    slots: int | None = None,
    connector: Connector = "fetch",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session that reads and writes Kafka, and that pipelines can run in.

    ``master``: by default this machine, with room for two rounds of ``slots`` tasks (as many as it
    has cores). ``connector``: where the Kafka connector's jars come from: fetched once into the
    user's cache, or a cluster that has them. ``settings``: more Spark settings, as text.

    A session that this process has already is returned if it is as was asked for; if not, all that
    it lacks is named in one error.
    """
    _check(connector, slots, settings or {})
    sessions.refuse_connect()
    found = sessions.active()
    if found is not None:
        return _as_asked(found, master, settings or {})
    more = dict(settings or {})
    if connector == "fetch":
        from sideline.stack.jars import connector_jars  # noqa: PLC0415 - a cluster does without
        from sideline.stack.java import find_java  # noqa: PLC0415

        jars = connector_jars(find_java(), progress=lambda _what, _doing: None)
        more["spark.jars"] = _joined(more.get("spark.jars"), jars)
    width = slots or os.cpu_count() or 1
    spark = sessions.build(width, master=master, name=name, settings=more)
    if not sessions.has_connector(spark):
        spark.stop()
        raise _without_connector(connector)
    return spark


def _check(connector: object, slots: object, settings: Mapping[str, str]) -> None:
    if connector not in CONNECTORS:
        message = f"connector is {connector!r}; it is one of {', '.join(CONNECTORS)}."
        raise ConfigurationError(message)
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise ConfigurationError(f"slots is {slots!r}; it is a whole number from 1.")
    wrong = [
        repr(key)
        for key, value in settings.items()
        if not isinstance(key, str) or not key.startswith("spark.") or not isinstance(value, str)
    ]
    if wrong:
        message = f"settings holds {', '.join(wrong)}; names begin with spark., values are text."
        raise ConfigurationError(message, hint='Write settings={"spark.executor.memory": "2g"}.')


def _without_connector(connector: Connector) -> ConfigurationError:
    if connector == "cluster":
        message = "Spark has no Kafka connector here (spark-sql-kafka-0-10)."
        return ConfigurationError(message, hint='Say connector="fetch", or add it to spark.jars.')
    message = (
        "Spark's JVM was started by an earlier session of this process, without the connector."
    )
    return ConfigurationError(message, hint="Ask for the session first, in a new process.")


def _joined(given: str | None, jars: Sequence[Path]) -> str:
    return ",".join([*([given] if given else []), *map(str, jars)])


def _as_asked(spark: SparkSession, master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """The session that is there already, unless it lacks something."""
    context = spark.sparkContext
    conf = context.getConf()
    wanted = dict(settings) | ({"spark.master": master} if master is not None else {})
    wrong = sessions.problems(spark)
    wrong += [
        f"{key}={conf.get(key) or 'unset'} (asked for: {value})"
        for key, value in wanted.items()
        if conf.get(key) != value
    ]
    if not sessions.has_connector(spark):
        wrong.append("no Kafka connector (spark-sql-kafka-0-10 is not among its jars)")
    if wrong:
        message = f"this process has a Spark session already, and it has {'; '.join(wrong)}."
        hint = "Stop that session first, or build it with these settings."
        raise ConfigurationError(message, hint=hint)
    return spark
