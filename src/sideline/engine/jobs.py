"""The Spark jobs of one run: one for each round, and a last one that ends its workers."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import orjson
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import cloudpickle

from sideline.engine.lease import Lease, Report
from sideline.engine.task import Farewell, Task
from sideline.errors import ConfigurationError, PartialError
from sideline.loading import module_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sideline.pipeline import Pipeline

# Other pipelines of the session may hold slots longer: the farewell then goes on without us.
FAREWELL_SECONDS = 5.0

log = logging.getLogger(__name__)


class Jobs:
    """Runs rounds on Spark; ``code`` is the pipeline, shipped once."""

    def __init__(self, spark: SparkSession, code: bytes) -> None:
        self._context = spark.sparkContext
        self._run = uuid.uuid4().hex
        self._shipped = self._context.broadcast(code)
        self.task = Task(self._run, self._shipped, tuple(sys.path))
        """What Spark's workers do with a lease."""
        self._used = False

    stopping: Callable[[], bool] = staticmethod(lambda: False)
    """Whether no further round is wanted."""

    def __call__(self, leases: list[Lease]) -> list[Report]:
        """One round: a task a lease, a report a task."""
        texts = [orjson.dumps(lease.as_dict()).decode() for lease in leases]
        self._used = True
        try:
            rdd = self._context.parallelize(texts, len(texts))
            results = rdd.mapPartitions(self.task).collect()
        except (ConnectionError, EOFError, Py4JNetworkError) as error:
            message = "Spark's JVM has ended."
            hint = "Run it again: it goes on where it stopped."
            raise PartialError(message, hint=hint) from error
        return [Report.from_dict(orjson.loads(text)) for text in results]

    def end(self) -> None:
        """Tear down what the run left in the workers.

        Also where the session ends: it closes idle workers without a signal. Those that a query
        feeds are others, and end when they have been idle for a minute.
        """
        if not self._used:
            return
        last = threading.Thread(target=self._end, name="sideline-farewell", daemon=True)
        last.start()
        last.join(FAREWELL_SECONDS)

    def _end(self) -> None:
        count = self._context.defaultParallelism
        try:
            self._context.parallelize(range(count), count).mapPartitions(
                Farewell(self._run)
            ).collect()
            self._shipped.destroy()
        # The session may be gone by now, and everything of ours with it.
        except Exception as error:  # noqa: BLE001
            log.debug("the workers were not told to end: %s", error)


def ship(pipeline: Pipeline) -> bytes:
    """The pipeline as the workers get it: with its module's code, without its secrets."""
    module = module_of(pipeline)
    by_value = module is not None and module.__name__ != "__main__" and _is_users(module)
    if module is not None and by_value:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    shipped = copy.copy(pipeline)
    if pipeline.prepare is not None:
        # It runs on the driver alone, and may hold DataFrames.
        shipped.prepare = _elsewhere
    try:
        return bytes(cloudpickle.dumps(shipped))  # type: ignore[no-untyped-call]
    # Whatever stands in the way of pickling: a lock, a connection, an open file.
    except Exception as error:
        message = f"pipeline {pipeline.name!r} cannot be sent to Spark's workers: {error}"
        hint = "Open what the handler needs in a function that the pipeline's setup decorates."
        raise ConfigurationError(message, hint=hint) from error
    finally:
        if module is not None and by_value:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _elsewhere(frame: DataFrame) -> NoReturn:
    message = f"prepare= runs on the driver, not where {frame} is"
    raise RuntimeError(message)


def _is_users(module: ModuleType) -> bool:
    # What is installed on this machine is installed on the workers.
    return "site-packages" not in (getattr(module, "__file__", None) or "")
