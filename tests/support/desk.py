"""A driver without Spark: rounds are a function of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sideline import Pipeline
from sideline.engine.driver import Driver, Options
from sideline.engine.lease import Lease, Partition, Report
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster
from tests.support.pipelines import execute, query
from tests.support.waiting import wait_for


def prepare(database: str) -> None:
    """Make the ledger's tables."""
    with connect(database, role="test") as connection:
        schema.ensure(connection)


class Desk:
    """One driver, at work in a thread; it ends with the test."""

    def __init__(
        self,
        database: str,
        kafka: str,
        pipeline: Pipeline,
        work: Callable[[Lease], Report] | None = None,
        **options: Any,
    ) -> None:
        if not pipeline.has_handler:
            pipeline.handler(lambda event: None)
        prepare(database)
        self.database = database
        self.pipeline = pipeline
        self.error: BaseException | None = None
        self.leased: list[set[Partition]] = []
        """What each round was about."""
        self._work = work
        self._ending = threading.Event()
        cluster = Cluster({"bootstrap.servers": kafka})
        place = Place(database, pipeline)
        self.driver = Driver(pipeline, place, cluster, self._run_round, Options(**options))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.driver.run()
        except BaseException as error:  # noqa: BLE001 - the test's to judge
            self.error = error

    def _run_round(self, leases: list[Lease]) -> list[Report]:
        self.leased.append({share.of for lease in leases for share in lease.shares})
        if self._work is not None:
            return [self._work(lease) for lease in leases]
        # A worker that finds nothing to do; it hears of a stop, not of the lease's end.
        self._ending.wait(max(0.0, min(0.3, leases[0].ends_at - time.time())))
        return [Report(lease.round) for lease in leases]

    def begun(self) -> Desk:
        """Wait until it stands and has read its rows."""
        wait_for(lambda: self.driver.rows() or self.error, what="the driver")
        return self

    def stop(self) -> BaseException | None:
        """Stop it, as SIGTERM does; what ended it, if something did."""
        self.driver.stop()
        return self.end()

    def end(self) -> BaseException | None:
        """Wait for its end; what ended it, if something did."""
        self._thread.join(60)
        self._ending.set()
        assert not self._thread.is_alive(), "the driver does not end"
        return self.error

    def rows(self, **columns: Any) -> None:
        """Change the progress rows of this pipeline: ``rows(partition=1, attempts=3)``."""
        number = columns.pop("partition", 0)
        sets = ", ".join(f"{name} = {value}" for name, value in columns.items())
        where = f"pipeline = '{self.pipeline.name}' and partition = {number}"
        execute(self.database, f"update sideline.progress set {sets} where {where}")

    def alerts(self) -> list[tuple[Any, ...]]:
        """Kind, subject, message and whether it is over, of every alert there ever was."""
        return query(
            self.database,
            "select kind, subject, message, cleared_at is not null from sideline.alerts"
            " where pipeline = %s order by id",
            self.pipeline.name,
        )

    def open(self) -> dict[tuple[str, str], str]:
        """The open alerts."""
        return {(kind, subject): text for kind, subject, text, over in self.alerts() if not over}
