"""A pipeline that runs: the same for a command, a program and a notebook."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sideline import guardrail
from sideline import settings as settings_module
from sideline.effects import Publish
from sideline.engine import secrets, session
from sideline.engine.driver import Driver, Options
from sideline.engine.jobs import Jobs, ship
from sideline.engine.room import Guest, Room
from sideline.errors import ConfigurationError, NotFoundError, RefusedError
from sideline.homes.writer import Writer
from sideline.ledger import contents, schema
from sideline.ledger.connection import place as where
from sideline.ledger.place import Place
from sideline.sinks import Kafka, Postgres
from sideline.topics.admin import Cluster
from sideline.topics.stash import check_stash

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.engine.batch import Query
    from sideline.engine.lease import Partition
    from sideline.ledger.connection import Connection
    from sideline.ledger.records import Elsewhere
    from sideline.pipeline import Pipeline, Start
    from sideline.settings import Settings

log = logging.getLogger(__name__)


class Running:
    """A pipeline at work in the background of this process."""

    def __init__(
        self,
        driver: Driver,
        spark: SparkSession,
        guest: Guest,
        jobs: Jobs,
        *,
        own_session: bool,
    ) -> None:
        self.driver = driver
        self._spark = spark
        self._guest = guest
        self.jobs = jobs
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
        replay_only: bool = False,
        settings: Settings | None = None,
        master: str | None = None,
        slots: int | None = None,
        take_over: bool = False,
        accept_loss: bool = False,
        wait_for_topics: bool = False,
        override_guard: bool = False,
        start: Start | None = None,
        bounds: Mapping[Partition, int] | None = None,
        query: Query | None = None,
    ) -> Running:
        """Check everything that can be checked, then start."""
        if not pipeline.has_handler:
            message = f"pipeline {pipeline.name!r} has no handler."
            hint = "Put @users.handler, with your pipeline's variable for users, above a function."
            raise ConfigurationError(message, hint=hint)
        guardrail.check(pipeline)
        session.refuse_connect(spark)
        if start is not None:
            # For this run: the caller's own says what it declares.
            pipeline = copy.copy(pipeline)
            pipeline.start_at = start
        found = settings or settings_module.load()
        database = _database(pipeline, found)
        kafka = found.kafka_client()
        place = Place(database, pipeline)
        try:
            cluster = Cluster(kafka)
            count = _partitions(pipeline, cluster, wait=wait_for_topics)
            width = slots or max(1, min(os.cpu_count() or 1, count or 1))
            # What can be refused without Spark is refused before it is started.
            check_stash(pipeline, cluster, wait=wait_for_topics)
            _check_sink(pipeline, cluster, kafka)
            code = ship(pipeline)
            place.ask(partial(_check_effects, pipeline))
            place.ask(schema.ensure)
            # A session that is there already belongs to whoever made it.
            spark = spark or session.active()
            own = spark is None
            spark = spark or _session(pipeline, width, master)
            session.check(spark)
            jobs = _jobs(spark, code, pipeline, cluster, database, kafka)
            guest = Guest(spark, width)
        except BaseException:
            place.close()
            raise
        access = secrets.write(database, kafka)
        options = Options(
            once=once,
            replay_only=replay_only,
            take_over=take_over,
            accept_loss=accept_loss,
            wait_for_topics=wait_for_topics,
            room=guest.room if pipeline.prepare is None else partial(_one_by_one, guest),
            secrets=str(access),
            database=where(database),
            start_given=start is not None,
            guard=not override_guard,
            alerting=found.alerting,
            retention=found.retention,
            bounds=bounds,
            fed=query is not None,
        )
        if query is None:
            driver = Driver(pipeline, place, cluster, jobs, options)
        else:
            driver = _fed_driver(query, kafka, pipeline, place, cluster, jobs, options)
        jobs.stopping = lambda: driver.stopping
        running = cls(driver, spark, guest, jobs, own_session=own)
        running._secrets = access
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
            **{
                count: sum(getattr(row, count) for row in rows)
                for count in (
                    *("consumed", "applied", "filtered", "skipped", "parked", "duplicate"),
                    "aside",
                )
            },
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
                secrets.remove(self._secrets)
            self.jobs.end()
            if self._own_session:
                self._stop_session()

    def _stop_session(self) -> None:
        try:
            self._spark.stop()
        # Its JVM may be gone already, which is what was wanted.
        except Exception as error:  # noqa: BLE001
            log.debug("Spark did not stop by itself: %s", error)


def _fed_driver(query: Query, kafka: dict[str, Any], *parts: Any) -> Driver:  # noqa: ANN401
    """A driver whose live events a query brings."""
    from sideline.engine.batches import BatchDriver  # noqa: PLC0415 - needs an extra

    driver = BatchDriver(*parts)
    driver.query, driver.kafka = query, kafka
    return driver


def _session(pipeline: Pipeline, slots: int, master: str | None) -> SparkSession:
    """A session of the run's own; with the Kafka connector where the JVM reads."""
    name = f"sideline {pipeline.name}"
    if pipeline.prepare is None:
        return session.build(slots, master=master, name=name)
    from sideline.spark import session as with_connector  # noqa: PLC0415 - needs an extra

    return with_connector(master=master, name=name, slots=slots)


def _jobs(  # noqa: PLR0913, PLR0917 - what rounds depend on
    spark: SparkSession,
    code: bytes,
    pipeline: Pipeline,
    cluster: Cluster,
    database: str,
    kafka: dict[str, Any],
) -> Jobs:
    """What runs rounds: with ``prepare=``, through the JVM."""
    if pipeline.prepare is None:
        return Jobs(spark, code)
    if not session.has_connector(spark):
        message = f"pipeline {pipeline.name!r} has prepare=, and Spark has no Kafka connector here."
        raise ConfigurationError(message, hint="Use sideline.spark.session().")
    try:
        from sideline.engine.preparing import PreparedJobs  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        message = f"prepare= needs {error.name}, which is not installed."
        raise ConfigurationError(message, hint="Install sideline[dataframes].") from error

    def elsewhere(connection: Connection) -> Elsewhere:
        return partial(contents.fetch, connection, kafka, pipeline.name)

    return PreparedJobs(
        spark, code, pipeline, cluster=cluster, database=database, kafka=kafka, elsewhere=elsewhere
    )


def _one_by_one(guest: Guest) -> Room:
    """A round of the JVM has nobody to hand over to."""
    return guest.room()._replace(hand_over=False)


def _check_effects(pipeline: Pipeline, connection: Connection) -> None:
    """What the pipeline declares must fit the tables that there are.

    Said of them is which are written event by event, and why (K9).
    """
    writer = Writer(connection, fold=pipeline.fold)
    for effect in pipeline.effects or ():
        if not isinstance(effect, type | Publish):
            writer.check(effect)
    for note in writer.notes():
        log.warning("%s: %s", pipeline.name, note)
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


def _check_sink(pipeline: Pipeline, source: Cluster, kafka: Mapping[str, Any]) -> None:
    """A transaction of Kafka ends at its cluster: what is read and written must be in one."""
    if not isinstance(pipeline.sink, Kafka) or pipeline.sink.bootstrap is None:
        return
    sink = Cluster({**kafka, "bootstrap.servers": pipeline.sink.bootstrap})
    if sink.id() != source.id():
        message = (
            f"pipeline {pipeline.name!r} reads from {source.bootstrap} and publishes to "
            f"{sink.bootstrap}, which is another cluster: no transaction spans the two."
        )
        raise RefusedError(message, hint="Use one cluster, and mirror the topic to the other one.")


def _database(pipeline: Pipeline, found: Settings) -> str:
    if isinstance(pipeline.sink, Postgres) and pipeline.sink.url:
        return pipeline.sink.url
    return found.require_database()
