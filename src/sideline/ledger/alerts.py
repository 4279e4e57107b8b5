"""The rows of alerts: raised once, worded anew as numbers change, cleared when it is over."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import TYPE_CHECKING, Any

from psycopg.rows import class_row

from sideline.alerts import Key
from sideline.errors import NotFoundError
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection


@dataclasses.dataclass(slots=True)
class OpenAlert:
    """One that the driver keeps an eye on."""

    key: Key
    message: str
    raised_at: datetime
    id: int | None = None
    """None: the ledger does not know it yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class AlertRow:
    """One as people see it."""

    id: int
    pipeline: str
    kind: str
    subject: str
    message: str
    raised_at: datetime
    updated_at: datetime
    cleared_at: datetime | None


class AlertRows:
    """The alerts of one pipeline, in the name of the driver that stands."""

    def __init__(self, pipeline: str, epoch: int) -> None:
        self._named = {"pipeline": pipeline, "epoch": epoch}

    def open(self, connection: Connection) -> dict[Key, OpenAlert]:
        """Those that are open, whoever raised them."""
        rows = connection.execute(queries()["open_alerts"], self._named).fetchall()
        connection.commit()
        return {
            Key(kind, subject): OpenAlert(Key(kind, subject), message, raised_at, number)
            for number, kind, subject, message, raised_at in rows
        }

    def raise_(
        self, key: Key, message: str, raised_at: datetime | None, connection: Connection
    ) -> OpenAlert | None:
        """Open one; None: it is open already, or another driver stands now."""
        given = {"message": message, "raised_at": raised_at}
        row = self._change(connection, "raise_alert", **key._asdict(), **given)
        return None if row is None else OpenAlert(key, message, row[1], row[0])

    def record(self, alert: OpenAlert, connection: Connection) -> datetime | None:
        """Write down one that came and went while the ledger was out of reach; when it ended."""
        given = {"message": alert.message, "raised_at": alert.raised_at}
        row = self._change(connection, "record_alert", **alert.key._asdict(), **given)
        return None if row is None else row[0]

    def word(self, alert: OpenAlert, connection: Connection) -> None:
        """Keep what it says up to date."""
        self._change(connection, "word_alert", id=alert.id, message=alert.message)

    def clear(self, alert: OpenAlert, connection: Connection) -> datetime | None:
        """It is over; when. None: another driver stands now."""
        row = self._change(connection, "clear_alert", id=alert.id)
        return None if row is None else row[0]

    def _change(
        self,
        connection: Connection,
        query: str,
        **parameters: Any,  # noqa: ANN401 - query parameters
    ) -> tuple[Any, ...] | None:
        cursor = connection.execute(queries()[query], self._named | parameters)
        row: tuple[Any, ...] | None = cursor.fetchone() if cursor.description else None
        connection.commit()
        return row


def page(
    connection: Connection,
    pipeline: str | None = None,
    *,
    cleared: bool = False,
    limit: int = 100,
    after: int | None = None,
) -> list[AlertRow]:
    """Open ones first, then, if wanted, those that are over; the newest of each first."""
    over = after is not None and _is_over(connection, after)
    named = {"pipeline": pipeline, "after": after, "limit": limit}
    found = [] if over else _list(connection, "list_open_alerts", named)
    if cleared and len(found) < limit:
        rest = {"limit": limit - len(found)} | ({} if over else {"after": None})
        found += _list(connection, "list_cleared_alerts", named | rest)
    return found


def count_open(connection: Connection, pipeline: str | None = None) -> int:
    """How many are open."""
    row = connection.execute(queries()["count_open_alerts"], {"pipeline": pipeline}).fetchone()
    return int(row[0]) if row else 0


def _list(connection: Connection, query: str, named: dict[str, Any]) -> list[AlertRow]:
    cursor = connection.cursor(row_factory=class_row(AlertRow))
    return cursor.execute(queries()[query], named).fetchall()


def _is_over(connection: Connection, number: int) -> bool:
    row = connection.execute(queries()["alert"], {"id": number}).fetchone()
    if row is None:
        message = f"there is no alert {number} to list on from."
        raise NotFoundError(message, hint="Take the number from the page before.")
    return bool(row[0])
