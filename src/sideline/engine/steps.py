"""The user's step in the JVM: which events it gets, and what of its result is a row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import to_arrow_schema

from sideline.engine.jvm_errors import Thrown, Told, tell
from sideline.engine.prepared import ID, OURS
from sideline.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.classify import Rule
    from sideline.engine.lease import Partition
    from sideline.events import Event
    from sideline.pipeline import Pipeline

# As Spark's Kafka connector has them.
SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp_ms bigint,"
    " timestampType int, headers array<struct<key:string,value:binary>>"
)
TYPES = {"topic": "string", "partition": "int", "offset": "bigint"}
_MOST_MS = 253_402_300_800_000
# Causes of causes that are looked at.
_DEEPEST = 20


Span = tuple[int, int]
"""Offsets, from the first to before the second."""


class Unprepared(Exception):  # noqa: N818 - of the step as a whole, never of an event
    """The step cannot be made at all."""

    def __init__(self, because: BaseException) -> None:
        super().__init__(str(because))
        self.because = because


def connector_options(kafka: Mapping[str, Any]) -> dict[str, str]:
    """How Spark's connector reaches Kafka."""
    strange = sorted(
        name
        for name, value in kafka.items()
        if name.startswith(("sasl.", "ssl."))
        or (name == "security.protocol" and str(value).lower() != "plaintext")
    )
    if strange:
        message = (
            f"prepare= reads Kafka with Spark's connector, which does not know {strange[0]}: "
            "only plaintext listeners are supported there in this version."
        )
        raise ConfigurationError(message, hint="Use Pipeline.foreach_batch, or drop prepare=.")
    return {"kafka.bootstrap.servers": str(kafka["bootstrap.servers"])}


class Step:
    """``prepare=`` of a pipeline."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, kafka: Mapping[str, Any]) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._options = connector_options(kafka)

    def live(self, spans: Mapping[Partition, Span]) -> DataFrame:
        """Rows of offsets that are read from Kafka."""
        names: dict[str, list[int]] = {}
        edges: tuple[dict[str, dict[str, int]], ...] = ({}, {})
        for spot, span in spans.items():
            names.setdefault(spot.topic, []).append(spot.number)
            for edge, offset in zip(edges, span, strict=True):
                edge.setdefault(spot.topic, {})[str(spot.number)] = offset
        frame = (
            self._spark.read.format("kafka")
            .options(**self._options)
            .option("kafka.isolation.level", "read_committed")
            .option("includeHeaders", "true")
            .option("assign", json.dumps(names))
            .option("startingOffsets", json.dumps(edges[0]))
            .option("endingOffsets", json.dumps(edges[1]))
            .load()
        )
        return self._made(frame)

    def back(self, events: Sequence[Event]) -> DataFrame:
        """Rows of events that come back from the ledger."""
        rows = [
            (
                event.key,
                event.value,
                event.topic,
                event.partition,
                event.offset,
                event.timestamp_ms if 0 <= event.timestamp_ms < _MOST_MS else None,
                0,
                [(name, value) for name, value in event.headers] or None,
            )
            for event in events
        ]
        frame = self._spark.createDataFrame(rows, SCHEMA)
        return self._made(
            frame.select(
                *("key", "value", *ID),
                functions.timestamp_millis("timestamp_ms").alias("timestamp"),
                *("timestampType", "headers"),
            )
        )

    def _made(self, frame: DataFrame) -> DataFrame:
        prepare: Any = self._pipeline.prepare
        try:
            made = self._checked(prepare(frame))
            return made.select(*ID, *(functions.col(_quoted(name)) for name in _new(frame, made)))
        except Unprepared:
            raise
        # The user's function, and what Spark thinks of it: it fails for every event alike.
        except Exception as error:
            raise Unprepared(error) from error

    def _checked(self, made: object) -> DataFrame:
        if not isinstance(made, DataFrame):
            self._refuse(f"returned a {type(made).__name__}; it has to return a DataFrame.")
        types = dict(made.dtypes)
        lost = [name for name, kind in TYPES.items() if types.get(name) != kind]
        if lost:
            self._refuse(
                f"lost or changed the columns {', '.join(lost)}.",
                'Keep them: df.withColumn(...), df.where(...), df.select("*", ...).',
            )
        twice = [name for name, count in Counter(made.columns).items() if count > 1]
        if twice:
            self._refuse(f"has two columns {twice[0]!r}.", "Rename or drop one of them.")
        ours = [name for name in made.columns if name.startswith(OURS)]
        if ours:
            self._refuse(f"has a column {ours[0]!r}; names with {OURS} are sideline's own.")
        try:
            to_arrow_schema(made.schema, timezone="UTC")
        except PySparkException as error:
            self._refuse(f"has a column that cannot go to Python: {error}", "Cast it.")
        return made

    def _refuse(self, problem: str, hint: str | None = None) -> NoReturn:
        message = f"prepare= of pipeline {self._pipeline.name!r} {problem}"
        raise Unprepared(ConfigurationError(message, hint=hint))


def _new(before: DataFrame, after: DataFrame) -> list[str]:
    """The columns that the step added or replaced: the record's own are read by the worker."""
    known = _ids(before)
    return [
        name for name, number in _ids(after).items() if name not in ID and known.get(name) != number
    ]


def _ids(frame: DataFrame) -> dict[str, int]:
    output = frame._jdf.queryExecution().analyzed().output()  # noqa: SLF001 - it has no public name
    attributes = [output.apply(place) for place in range(output.size())]
    return {one.name(): one.exprId().id() for one in attributes}


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def told(error: BaseException, rules: Sequence[Rule] = ()) -> Told:
    """What Spark said, in a sentence; ``rules`` are the pipeline's ``recoverable=``."""
    # Where pyspark keeps the JVM's own exception: one name for each of its two kinds.
    thrown: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[Thrown] = []
    while thrown is not None and len(chain) < _DEEPEST:
        chain.append(Thrown(thrown.getClass().getName(), thrown.getMessage() or ""))
        thrown = thrown.getCause()
    return tell(chain or [Thrown(type(error).__name__, str(error))], rules)
