"""Raises and clears a pipeline's alerts: the rows, the log and the hooks. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import psycopg

from sideline.alerts import Alerting, Key, Limits, Memory, Scene, compare, during_outage, wanted
from sideline.hooks import FAREWELL_SECONDS, hooks_of
from sideline.ledger.alerts import AlertRows, OpenAlert

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.ledger.place import Place
    from sideline.pipeline import Pipeline

T = TypeVar("T")

log = logging.getLogger(__name__)


class Alarm:
    """The alerts of one pipeline, while its driver stands."""

    def __init__(self, pipeline: Pipeline, place: Place, alerting: Alerting) -> None:
        self._pipeline = pipeline.name
        self._place = place
        self._limits = Limits.of(pipeline, alerting)
        self._memory = Memory(self._limits)
        self._hooks = hooks_of(alerting)
        self._open: dict[Key, OpenAlert] = {}
        self._known = False
        """Whether the ledger has been asked which ones are open."""

    def look(self, scene: Scene, now: float) -> None:
        """Bring the open alerts in line with what is to be seen now."""
        self._ask_once()
        now_wanted = wanted(self._memory.see(scene, now), self._limits, self._messages())
        self._write_late(now_wanted)
        self._settle(now_wanted)

    def outage(self, services: Mapping[str, str], now: float) -> None:
        """The same without the ledger: whoever listens learns of it in any case."""
        sight = self._memory.outage(services, now)
        now_wanted = during_outage(sight, self._limits, self._messages())
        for key, message in compare(self._messages(), now_wanted).raised.items():
            self._open[key] = OpenAlert(key, message, datetime.now(UTC))
            self._tell("raised", self._open[key])

    def fail(self, key: Key, message: str) -> None:
        """Raise one because the run ends."""
        self._ask_once()
        self._settle({alert.key: alert.message for alert in self._open.values()} | {key: message})

    def close(self) -> None:
        """Wait a little for the hooks."""
        until = time.monotonic() + FAREWELL_SECONDS
        for hook in self._hooks:
            hook.close(max(0.0, until - time.monotonic()))

    def _ask_once(self) -> None:
        """What the driver before us raised is ours to clear."""
        if self._known:
            return
        unwritten = {key: alert for key, alert in self._open.items() if alert.id is None}
        self._open = unwritten | self._ask(self._rows.open)
        self._known = True

    def _write_late(self, now_wanted: Mapping[Key, str]) -> None:
        """Write down what was raised, and told, while the ledger was away."""
        for key, alert in list(self._open.items()):
            if alert.id is not None:
                continue
            if key in now_wanted:
                written = self._ask(partial(self._rows.raise_, key, alert.message, alert.raised_at))
                self._known = written is not None
                self._open[key] = written or alert
                continue
            ended = self._ask(partial(self._rows.record, alert))
            del self._open[key]
            if ended is not None:
                self._tell("cleared", alert, ended)

    def _settle(self, now_wanted: Mapping[Key, str]) -> None:
        raised, worded, cleared = compare(self._messages(), now_wanted)
        for key in cleared:
            alert = self._open.pop(key)
            at = self._ask(partial(self._rows.clear, alert))
            if at is not None:
                self._tell("cleared", alert, at)
        for key, message in worded.items():
            self._open[key].message = message
            self._ask(partial(self._rows.word, self._open[key]))
        for key, message in raised.items():
            new = self._ask(partial(self._rows.raise_, key, message, None))
            if new is None:
                # It is open already, though we did not know: ask again.
                self._known = False
                continue
            self._open[key] = new
            self._tell("raised", new)

    def _tell(self, event: str, alert: OpenAlert, cleared_at: datetime | None = None) -> None:
        about = " ".join(filter(None, alert.key))
        log.warning("%s: alert %s: %s: %s", self._pipeline, event, about, alert.message)
        for hook in self._hooks:
            hook.send(
                {
                    "event": event,
                    "pipeline": self._pipeline,
                    "kind": alert.key.kind,
                    "subject": alert.key.subject,
                    "message": alert.message,
                    "raised_at": alert.raised_at,
                    "cleared_at": cleared_at,
                }
            )

    def _messages(self) -> dict[Key, str]:
        return {key: alert.message for key, alert in self._open.items()}

    @property
    def _rows(self) -> AlertRows:
        return AlertRows(self._pipeline, self._place.epoch)

    def _ask(self, question: Callable[[Connection], T]) -> T:
        def careful(connection: Connection) -> T:
            try:
                return question(connection)
            except psycopg.Error:
                if not (connection.broken or connection.closed):
                    connection.rollback()
                raise

        try:
            return self._place.ask(careful)
        except Exception:
            # Half of it may be written: ask again what is open before the next step.
            self._known = False
            raise
