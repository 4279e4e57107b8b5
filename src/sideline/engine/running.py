"""A pipeline that runs: the same for a command, a program and a notebook."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import uuid
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import orjson
from pyspark import cloudpickle

from sideline import settings as settings_module
from sideline.engine import session
from sideline.engine.driver import Driver, Options, Runner
from sideline.engine.lease import Lease, Report
from sideline.engine.room import Guest
from sideline.engine.task import Task
from sideline.errors import ConfigurationError, NotFoundError
from sideline.homes.writer import Writer
from sideline.ledger.place import Place
from sideline.loading import module_of
from sideline.sinks import Postgres
from sideline.topics.admin import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline, Start
    from sideline.settings import Settings

log = logging.getLogger(__name__)


class Running:
    """A pipeline at work in the background of this process."""

    def __init__(
        self, driver: Driver, spark: SparkSession, guest: Guest, *, own_session: bool
    ) -> None:
        self.driver = driver
        self._spark = spark
        self._guest = guest
        self._own_session = own_session
        self._error: BaseException | None = None
        self._secrets: Path | None = None
        self._thread = threading.Thread(target=self._run, name="sideline-driver", daemon=True)

    @classmethod
    def begin(  # noqa: PLR0913 - by keyword, as on the command line
        cls,
        pipeline: Pipeline,
        spark: SparkSession | None = None,
        *,
        once: bool = False,
        settings: Settings | None = None,
        master: str | None = None,
        slots: int | None = None,
        take_over: bool = False,
        accept_loss: bool = False,
        wait_for_topics: bool = False,
        start: Start | None = None,
    ) -> Running:
        """Check everything that can be checked, then start."""
        if not pipeline.has_handler:
            message = f"pipeline {pipeline.name!r} has no handler."
            hint = f"Decorate a function with @{pipeline.name}.handler in the pipeline's file."
            raise ConfigurationError(message, hint=hint)
        if start is not None:
            pipeline.start_at = start
        found = settings or settings_module.load()
        database = _database(pipeline, found)
        kafka = found.kafka_client()
        place = Place(database, pipeline)
        try:
            cluster = Cluster(kafka)
            count = _partitions(pipeline, cluster, wait=wait_for_topics)
            width = slots or max(1, min(os.cpu_count() or 1, count or 1))
            own = spark is None
            spark = spark or session.build(width, master=master, name=f"sideline {pipeline.name}")
            session.check(spark)
            place.ask(partial(_check_effects, pipeline))
            run_round = _runner(spark, pipeline)
            guest = Guest(spark, width)
        except BaseException:
            place.close()
            raise
        secrets = _write_secrets(database, kafka)
        options = Options(
            once=once,
            take_over=take_over,
            accept_loss=accept_loss,
            wait_for_topics=wait_for_topics,
            room=guest.room,
            secrets=str(secrets),
            start_given=start is not None,
        )
        driver = Driver(pipeline, place, cluster, run_round, options)
        running = cls(driver, spark, guest, own_session=own)
        running._secrets = secrets
        running._thread.start()
        return running

    def stop(self) -> None:
        """Ask it to end at the next slice boundary; see `wait`."""
        self.driver.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; True if it has come. Raises what ended it, if something did."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        """Progress as last read, and what is not as it should be."""
        rows = self.driver.rows()
        ends = {state.partition: state for state in self.driver.states()}
        return {
            "alive": self.is_alive,
            "consumed": sum(row.consumed for row in rows),
            "applied": sum(row.applied for row in rows),
            "filtered": sum(row.filtered for row in rows),
            "skipped": sum(row.skipped for row in rows),
            "lag": sum(state.lag for state in ends.values()),
            "partitions": [
                {
                    "topic": row.topic,
                    "partition": row.partition,
                    "next_offset": row.next_offset,
                    "consumed": row.consumed,
                }
                for row in rows
            ],
            "troubles": dict(self.driver.troubles),
        }

    def _run(self) -> None:
        try:
            self.driver.run()
        # Kept for whoever waits: nobody else would see it.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._guest.leave()
            if self._secrets is not None:
                self._secrets.unlink(missing_ok=True)
                self._secrets.parent.rmdir()
            if self._own_session:
                self._spark.stop()


def _check_effects(pipeline: Pipeline, connection: Connection) -> None:
    """What the pipeline declares must fit the tables that there are."""
    writer = Writer(connection, fold=pipeline.fold)
    for effect in pipeline.effects or ():
        if not isinstance(effect, type):
            writer.check(effect)
    connection.rollback()


def _partitions(pipeline: Pipeline, cluster: Cluster, *, wait: bool) -> int:
    """How many partitions there are now; a missing topic is an error unless it may come later."""
    count = 0
    for name in pipeline.topics:
        try:
            count += len(cluster.topic(name).partitions)
        except NotFoundError:
            if not wait:
                raise
    return count


def _database(pipeline: Pipeline, found: Settings) -> str:
    if isinstance(pipeline.sink, Postgres) and pipeline.sink.url:
        return pipeline.sink.url
    return found.require_database()


def _write_secrets(database: str, kafka: dict[str, Any]) -> Path:
    """Addresses and passwords for the workers: in a file that only this user can read."""
    folder = Path(tempfile.mkdtemp(prefix="sideline-run-"))
    path = folder / "access.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(orjson.dumps({"database": database, "kafka": kafka}))
    return path


def ship(pipeline: Pipeline) -> bytes:
    """The pipeline as the workers get it: with its module's code, without its secrets."""
    module = module_of(pipeline)
    by_value = module is not None and module.__name__ != "__main__" and _is_users(module)
    if module is not None and by_value:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        return bytes(cloudpickle.dumps(pipeline))  # type: ignore[no-untyped-call]
    # Whatever stands in the way of pickling: a lock, a connection, an open file.
    except Exception as error:
        message = f"pipeline {pipeline.name!r} cannot be sent to Spark's workers: {error}"
        hint = f"Open what the handler needs in a function with @{pipeline.name}.setup."
        raise ConfigurationError(message, hint=hint) from error
    finally:
        if module is not None and by_value:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _is_users(module: ModuleType) -> bool:
    # What is installed on this machine is installed on the workers.
    return "site-packages" not in (getattr(module, "__file__", None) or "")


def _runner(spark: SparkSession, pipeline: Pipeline) -> Runner:
    """One Spark job a round; the pipeline is shipped once."""
    context = spark.sparkContext
    shipped = context.broadcast(ship(pipeline))
    task = Task(uuid.uuid4().hex, shipped, tuple(sys.path))

    def run(leases: list[Lease]) -> list[Report]:
        texts = [orjson.dumps(lease.as_dict()).decode() for lease in leases]
        results = context.parallelize(texts, len(texts)).mapPartitions(task).collect()
        return [Report.from_dict(orjson.loads(text)) for text in results]

    return run
