"""A pipeline that runs: the same for a command, a program and a notebook."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sideline import settings as settings_module
from sideline.engine import session
from sideline.engine.driver import Driver, Options
from sideline.engine.jobs import Jobs, ship
from sideline.engine.room import Guest
from sideline.errors import ConfigurationError, NotFoundError
from sideline.homes.writer import Writer
from sideline.ledger import schema
from sideline.ledger.connection import place as where
from sideline.ledger.place import Place
from sideline.sinks import Postgres
from sideline.topics.admin import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline, Start
    from sideline.settings import Settings

log = logging.getLogger(__name__)

_FOLDER = "sideline-run-"


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
        self._jobs = jobs
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
            hint = "Put @users.handler, with your pipeline's variable for users, above a function."
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
            # What can be refused without Spark is refused before it is started.
            code = ship(pipeline)
            place.ask(partial(_check_effects, pipeline))
            place.ask(schema.ensure)
            # A session that is there already belongs to whoever made it.
            spark = spark or session.active()
            own = spark is None
            spark = spark or session.build(width, master=master, name=f"sideline {pipeline.name}")
            session.check(spark)
            jobs = Jobs(spark, code)
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
            database=where(database),
            start_given=start is not None,
        )
        driver = Driver(pipeline, place, cluster, jobs, options)
        running = cls(driver, spark, guest, jobs, own_session=own)
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
            self._jobs.end()
            if self._own_session:
                self._stop_session()

    def _stop_session(self) -> None:
        try:
            self._spark.stop()
        # Its JVM may be gone already, which is what was wanted.
        except Exception as error:  # noqa: BLE001
            log.debug("Spark did not stop by itself: %s", error)


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


def _bury_secrets() -> None:
    """Remove what drivers left behind that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        ours = folder.stat(follow_symlinks=False).st_uid == os.getuid()
        if ours and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write_secrets(database: str, kafka: dict[str, Any]) -> Path:
    """Addresses and passwords for the workers: in a file that only this user can read."""
    _bury_secrets()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    path = folder / "access.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(orjson.dumps({"database": database, "kafka": kafka}))
    return path
