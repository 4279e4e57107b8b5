"""Alerts: raised once, told, taken over by the next driver, cleared when it is over, listed."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sideline import Backoff, Pipeline
from sideline.alerts import Alerting, Key, Scene
from sideline.engine.alarm import Alarm
from sideline.engine.lease import Lease, PartitionReport, Report, failure_of
from sideline.errors import EventFailedError, FencedError
from sideline.hooks import TIMEOUT_SECONDS, TRIES
from sideline.ledger.alerts import AlertRows, page
from sideline.ledger.place import Place
from sideline.policies import Block
from tests.support.desk import prepare
from tests.support.pipelines import execute, numbered, publish, query
from tests.support.waiting import wait_for

# Quick, because a run that ends waits only a little for it.
RECORD = 'printf "%s\\n" "$(cat)" >> "$0"'


class Told:
    """What a command was told, in its order."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "told"
        self.alerting = Alerting(command=("sh", "-c", RECORD, str(self._file)))

    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines()]

    def events(self) -> list[tuple[str, str, str]]:
        return [(told["event"], told["kind"], told["subject"]) for told in self.notices()]

    def _lines(self) -> list[str]:
        return self._file.read_text().splitlines() if self._file.exists() else []


@pytest.fixture
def told(tmp_path) -> Told:
    return Told(tmp_path)


# The driver


def test_parked_events_are_raised_once_and_cleared_when_none_waits(desk, topics, told, caplog):
    """A row, a log line and a hook, each once; the numbers follow (S1, S2)."""
    pipeline = Pipeline("login", topics=topics(partitions=2))
    with caplog.at_level(logging.WARNING):
        driver = desk(pipeline, alerting=told.alerting)
        driver.rows(partition=1, parked=3, aside=1, consumed=3)
        wait_for(driver.open, what="the alert")
        assert driver.open() == {("parked", ""): "3 events wait; 1 key is aside."}
        driver.rows(partition=0, parked=2, aside=1, consumed=2)
        wait_for(lambda: "5 events" in driver.open()["parked", ""], what="the new number")
        driver.rows(partition=0, parked=0, aside=0, consumed=0)
        driver.rows(partition=1, parked=0, aside=0, consumed=0)
        wait_for(lambda: not driver.open(), what="the end of the alert")
        driver.stop()

    assert len(driver.alerts()) == 1
    assert told.events() == [("raised", "parked", ""), ("cleared", "parked", "")]
    first, last = told.notices()
    assert set(first) == {
        *("event", "pipeline", "kind", "subject", "message", "raised_at", "cleared_at")
    }
    assert first["pipeline"] == "login"
    assert first["cleared_at"] is None
    assert first["raised_at"] == last["raised_at"] < last["cleared_at"]
    assert caplog.text.count("login: alert raised: parked") == 1
    assert caplog.text.count("login: alert cleared: parked") == 1


def test_a_stop_clears_nothing_that_is_true_and_the_next_driver_takes_over(desk, topics, told):
    """Not raised again, and cleared by whoever sees the end of it (S2)."""
    topic = topics(partitions=1)
    first = desk(Pipeline("heirs", topics=topic), alerting=told.alerting)
    first.rows(parked=3, consumed=3)
    wait_for(first.open, what="the alert")
    assert first.stop() is None
    assert set(first.open()) == {("parked", "")}

    second = desk(Pipeline("heirs", topics=topic), alerting=told.alerting)
    second.rows(parked=4, consumed=4)
    wait_for(lambda: "4 events" in second.open()["parked", ""], what="a look of the second")
    second.rows(parked=0, consumed=0)
    wait_for(lambda: not second.open(), what="the end of the alert")
    second.stop()

    assert len(second.alerts()) == 1
    assert told.events() == [("raised", "parked", ""), ("cleared", "parked", "")]


def test_a_partition_that_retries_is_seen_and_then_an_alert(desk, topics, cli, caplog):
    """Attempt, due time and error in status and log while it lasts, the alert at the limit (F2)."""
    topic = topics(partitions=2)
    retry = Backoff(alert_after="2s")
    with caplog.at_level(logging.WARNING):
        driver = desk(Pipeline("patient", topics=topic, retry=retry))
        due = "now() + interval '1 hour'"
        trouble = "'OperationalError: away'"
        driver.rows(partition=1, attempts=1, trouble=trouble, due_at=due, stuck_at=7)
        wait_for(lambda: "waits after attempt 1" in caplog.text, what="the line of an attempt")
        driver.rows(partition=1, attempts=2)
        # It may have been raised before the second attempt was seen.
        wait_for(
            lambda: any("(attempt 2)" in text for text in driver.open().values()),
            what="the alert",
        )
    assert f"{topic}/1 at event {topic}/1/7 waits after attempt 1, again at" in caplog.text
    assert caplog.text.count("waits after attempt 2") == 1
    ((key, text),) = driver.open().items()
    assert key == ("backoff", f"{topic}/1")
    assert f"more than 2 s at event {topic}/1/7 (attempt 2): OperationalError: away" in text

    code, out, err = cli("status", "patient")
    assert code == 0
    assert "attempt 2 at offset 7, again at" in out
    assert "OperationalError: away" in out
    assert "1 alert is open: sideline alerts patient" in err

    driver.rows(partition=1, attempts=0, trouble="null", due_at="null", stuck_at="null")
    wait_for(lambda: not driver.open(), what="the end of the alert")


def test_a_blocked_partition_is_told_at_once(desk, topics, told):
    """Long before `alert_after` (F6, S2)."""
    topic = topics(partitions=1)
    driver = desk(
        Pipeline("loud", topics=topic, on_failure=Block(), retry=Backoff(alert_after="1h")),
        alerting=told.alerting,
    )
    driver.rows(attempts=1, trouble="'ValueError: no'", stuck_at=0)
    wait_for(told.events, what="the hook")
    assert told.events() == [("raised", "blocked", f"{topic}/0")]


def guard_trips(topic: str) -> Callable[[Lease], Report]:
    """A round in which the flood guard trips."""

    def work(lease: Lease) -> Report:
        failure = failure_of(ValueError("no"), event=f"{topic}/0/5", stage="guard")
        return Report(lease.round, failure=failure)

    return work


def test_a_flood_is_told_before_the_run_ends_and_cleared_by_one_that_passes_it(
    desk, topics, told, kafka
):
    """The alert of a pipeline that stands still is the one that matters most (F12, S2)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(20))
    pipeline = Pipeline("flooded", topics=topic)
    first = desk(pipeline, guard_trips(topic), alerting=told.alerting)
    error = first.end()
    assert isinstance(error, EventFailedError)
    assert error.exit_code == 7
    assert "--override-guard" in error.hint
    # The hook had its time although the run was over.
    assert told.events() == [("raised", "flood", f"{topic}/0")]
    assert f"{topic}/0/5: ValueError: no" in first.open()["flood", f"{topic}/0"]

    second = desk(pipeline, guard_trips(topic), alerting=told.alerting)
    second.end()
    assert told.events() == [("raised", "flood", f"{topic}/0")]

    third = desk(pipeline, alerting=told.alerting)
    third.rows(next_offset=6, consumed=6, applied=6)
    wait_for(lambda: not third.open(), what="the end of the alert")
    third.stop()
    assert told.events()[1:] == [("cleared", "flood", f"{topic}/0")]


def test_a_run_that_fails_otherwise_is_told_too(desk, topics, kafka):
    """A deployment's failure stops the pipeline: open until a run gets past that event (S2)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    pipeline = Pipeline("misfit", topics=topic)

    def work(lease: Lease) -> Report:
        error = psycopg.errors.UndefinedColumn("column users.name does not exist")
        return Report(lease.round, failure=failure_of(error, event=f"{topic}/0/2", stage="write"))

    first = desk(pipeline, work)
    assert isinstance(first.end(), EventFailedError)
    assert "does not fit its database" in first.open()["failed", f"{topic}/0"]

    def passes(lease: Lease) -> Report:
        execute(
            first.database,
            "update sideline.progress set next_offset = 5, consumed = 5, applied = 5",
        )
        done = PartitionReport(topic, 0, taken=True, next_offset=5, high=5, consumed=5, applied=5)
        return Report(lease.round, partitions=[done])

    second = desk(pipeline, passes, once=True)
    assert second.end() is None
    assert second.open() == {}


def test_workers_that_die_in_a_row_are_told(desk, topics, kafka):
    """Cleared when a round comes to its end and moves something (S2)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    heals = []

    def work(lease: Lease) -> Report:
        if not heals:
            raise RuntimeError("Python worker exited unexpectedly (crashed)")
        done = PartitionReport(topic, 0, taken=True, next_offset=5, high=5, consumed=5, applied=5)
        return Report(lease.round, partitions=[done])

    driver = desk(Pipeline("mortal", topics=topic), work)
    wait_for(driver.open, what="the alert")
    assert "ended in a crash: Python worker exited" in driver.open()["crashes", ""]
    heals.append(True)
    wait_for(lambda: not driver.open(), what="the end of the alert")


def test_lag_over_the_limit_is_told(desk, topics, kafka):
    """Only because it is set (S2, S4)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(30))
    driver = desk(Pipeline("behind", topics=topic), alerting=Alerting(lag_events=20))
    wait_for(driver.open, what="the alert")
    assert "it is 30 events and" in driver.open()["lag", ""]


def test_a_webhook_that_hangs_does_not_hold_the_driver_up(desk, topics):
    """Nor does it keep a stop for longer than a few seconds (S2)."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        driver = desk(
            Pipeline("hurried", topics=topics(partitions=1)), alerting=Alerting(webhook=url)
        )
        driver.rows(parked=1, consumed=1)
        wait_for(driver.open, what="the alert")
        rounds = len(driver.leased)
        # All its tries together hang for longer than any of these may take.
        hangs = TRIES * TIMEOUT_SECONDS
        wait_for(
            lambda: len(driver.leased) > rounds + 3, what="further rounds", within_seconds=hangs
        )
        driver.rows(parked=0, consumed=0)
        wait_for(lambda: not driver.open(), what="the end of the alert", within_seconds=hangs)
        began = time.monotonic()
        driver.stop()
        assert time.monotonic() - began < hangs


def test_a_key_that_steps_aside_is_told(start, ready, kafka, topics, told):
    """From the handler's exception to the hook, by a real run (F4, S1, S2)."""
    topic = topics(partitions=1)
    pipeline = Pipeline("zoe", topics=topic)

    @pipeline.handler
    def spell(event):
        if event.value == b"Zo\xc3\xab":
            raise ValueError("cannot spell this")

    settings = dataclasses.replace(ready, alerting=told.alerting)
    running = start(pipeline, settings=settings)
    publish(kafka, topic, [("1", "Zoey"), ("1", "Zoë"), ("2", "Bob"), ("1", "Zoiee")])
    wait_for(told.notices, what="the hook", within_seconds=120)
    # The second event may have come in a slice of its own.
    open_ones = "select message from sideline.alerts where cleared_at is null"
    both = [("2 events wait; 1 key is aside.",)]
    wait_for(lambda: query(ready.database, open_ones) == both, what="both in the alert")
    running.stop()
    assert running.wait(60)
    assert told.events() == [("raised", "parked", "")]


# Without the ledger


@pytest.fixture
def standing(database, topics) -> Iterator[Place]:
    """A driver's place that is held."""
    prepare(database)
    pipeline = Pipeline("standing", topics="t")
    place = Place(database, pipeline)
    place.hold()
    yield place
    place.close()


def test_an_outage_of_the_database_is_told_although_it_cannot_be_written(standing, database, told):
    """And written down, with its times, when the ledger is back (F2, S2)."""
    alarm = Alarm(Pipeline("standing", topics="t"), standing, told.alerting)
    now = time.time()
    alarm.look(Scene([]), now)
    away = {"database": "connection refused", "kafka": "no answer"}
    alarm.outage(away, now)
    alarm.outage(away, now + 59)
    assert told.events() == []
    alarm.outage(away, now + 61)
    alarm.outage(away, now + 62)
    raised = [("raised", "backoff", "database"), ("raised", "backoff", "kafka")]
    wait_for(lambda: told.events() == raised, what="the hooks")
    assert query(database, "select kind from sideline.alerts") == []

    alarm.look(Scene([], services={"kafka": "no answer"}), now + 120)
    alarm.look(Scene([]), now + 121)
    alarm.close()

    assert told.events() == [
        *raised,
        ("cleared", "backoff", "database"),
        ("cleared", "backoff", "kafka"),
    ]
    rows = query(
        database, "select subject, cleared_at > raised_at from sideline.alerts order by subject"
    )
    assert rows == [("database", True), ("kafka", True)]


def test_a_driver_that_was_replaced_neither_raises_nor_clears(standing, database):
    """Only the epoch that stands speaks for the pipeline (K1)."""
    with psycopg.connect(database) as connection:
        old, new = AlertRows("standing", standing.epoch), AlertRows("standing", standing.epoch + 1)
        opened = old.raise_(Key("parked"), "3 wait", None, connection)
        assert opened is not None
        execute(database, "update sideline.pipelines set epoch = epoch + 1")
        assert old.raise_(Key("lag"), "behind", None, connection) is None
        assert old.clear(opened, connection) is None
        assert old.record(opened, connection) is None
        assert new.raise_(Key("parked"), "4 wait", None, connection) is None
        assert [alert.message for alert in new.open(connection).values()] == ["3 wait"]
        assert new.clear(opened, connection) is not None


def test_a_ledger_that_refuses_alerts_does_not_stop_the_pipeline(desk, topics, database):
    """What can be done is done; the trouble is named."""
    driver = desk(Pipeline("robust", topics=topics(partitions=1)))
    execute(database, "alter table sideline.alerts rename to elsewhere")
    driver.rows(parked=1, consumed=1)
    wait_for(lambda: "alerts" in driver.driver.troubles, what="the trouble")
    assert 'relation "sideline.alerts" does not exist' in driver.driver.troubles["alerts"]
    execute(database, "alter table sideline.elsewhere rename to alerts")
    wait_for(driver.open, what="the alert")
    wait_for(lambda: "alerts" not in driver.driver.troubles, what="the end of the trouble")
    assert driver.stop() is None


def test_a_replaced_driver_still_ends_fenced(desk, topics, database):
    """Alerts do not hide it (C2)."""
    driver = desk(Pipeline("replaced", topics=topics(partitions=1)))
    driver.rows(lease="array[99::bigint]")
    assert isinstance(driver.end(), FencedError)
    assert driver.alerts() == []


# The command


PIPELINES = "insert into sideline.pipelines (name) values ('login'), ('mail'), ('quiet')"
ALERT = """
insert into sideline.alerts (pipeline, kind, subject, message, raised_at, cleared_at)
values (%s, %s, %s, %s, now() - %s::interval, now() - %s::interval)
returning id
"""


@pytest.fixture
def listed(database) -> Callable[..., int]:
    """Insert an alert: ``listed("login", "parked", age="2 hours", ended=None)``."""
    prepare(database)
    execute(database, PIPELINES)

    def insert(pipeline, kind, subject="", message="why", age="0s", ended=None) -> int:
        rows = query(database, ALERT, pipeline, kind, subject, message, age, ended)
        return int(rows[0][0])

    return insert


def test_open_alerts_are_listed_with_their_age(cli, listed):
    """The newest first; what is over only when asked for (S2)."""
    listed("login", "parked", message="3 events wait", age="3 hours 5 minutes 9 seconds")
    listed("mail", "backoff", "orders/3", "away", age="59 seconds")
    listed("mail", "lag", message="long ago", age="4 days", ended="1 day")

    code, out, err = cli("alerts")
    assert (code, err) == (0, "")
    head, *lines = (line.split("\t") for line in out.splitlines())
    assert head == ["id", "pipeline", "kind", "subject", "raised", "age", "message"]
    assert [(line[1], line[2], line[3], line[6]) for line in lines] == [
        ("mail", "backoff", "orders/3", "away"),
        ("login", "parked", "all", "3 events wait"),
    ]
    assert lines[1][5] == "3h 5m"

    _, out, _ = cli("alerts", "login")
    assert "orders/3" not in out
    _, out, _ = cli("alerts", "--all")
    last = out.splitlines()[-1].split("\t")
    assert last[6:] == ["3d 0h", "long ago"]
    assert last[5].endswith("Z")


def test_nothing_open_is_said(cli, listed):
    """Exit code 0 (S2)."""
    listed("login", "lag", ended="0s")
    code, out, err = cli("alerts")
    assert (code, out, err.strip()) == (0, "", "No alert is open.")
    assert cli("alerts", "--check")[0] == 0


def test_check_exits_3_while_one_is_open(cli, listed):
    """For monitoring that only knows exit codes; of that pipeline alone, if one is named."""
    listed("login", "parked")
    assert cli("alerts", "--check")[0] == 3
    assert cli("alerts", "login", "--check")[0] == 3
    assert cli("alerts", "quiet", "--check")[0] == 0
    code, out, _ = cli("alerts", "--check", "--json")
    assert code == 3
    assert json.loads(out)["open"] == 1


def test_alerts_as_json(cli, listed):
    """Everything, with exact times (S2)."""
    number = listed("login", "backoff", "users/1", "away", age="1 minute")
    _, out, _ = cli("alerts", "--json")
    (alert,) = json.loads(out)["alerts"]
    assert alert["id"] == number
    assert (alert["pipeline"], alert["kind"], alert["subject"]) == ("login", "backoff", "users/1")
    assert alert["cleared_at"] is None
    assert alert["raised_at"].endswith("Z")


def test_pages_hold_every_alert_once(cli, listed):
    """Open ones first, then the others; also where many were raised in the same moment."""
    wanted = [listed("login", "parked", f"t/{n}", age=f"{n} hours") for n in range(7)]
    wanted += [listed("mail", "lag", age="9 days", ended="1 day") for _ in range(8)][::-1]
    wanted += [listed("mail", "lag", age="10 days", ended="0s")]
    seen: list[int] = []
    after: list[str] = []
    while True:
        _, out, _ = cli("alerts", "--all", "--limit", "3", "--json", *after)
        found = json.loads(out)
        seen += [alert["id"] for alert in found["alerts"]]
        if found["next"] is None:
            break
        after = ["--after", str(found["next"])]
    assert seen == wanted
    _, _, err = cli("alerts", "--limit", "3")
    assert f"There is more: --after {wanted[2]}" in err


def test_an_alert_that_is_cleared_between_two_pages_costs_none_of_the_others(listed, database):
    """The page goes on behind it."""
    numbers = [listed("login", "parked", f"t/{n}", age=f"{n} hours") for n in range(3)]
    ended = listed("mail", "lag", age="9 days", ended="1 day")
    with psycopg.connect(database) as connection:
        execute(
            database,
            f"update sideline.alerts set cleared_at = now() where id = {numbers[2]}",
        )
        rows = page(connection, cleared=True, after=numbers[2])
    assert [row.id for row in rows] == [ended]


def test_names_and_numbers_that_are_not_there(cli, listed):
    """Exit code 4, in a sentence."""
    code, _, err = cli("alerts", "nobody")
    assert code == 4
    assert "no pipeline 'nobody' has run" in err
    code, _, err = cli("alerts", "--after", "999")
    assert code == 4
    assert "no alert 999" in err
    assert cli("alerts", "--after", str(2**64))[0] == 2


def test_a_database_without_a_ledger_has_no_alerts(cli):
    """Nothing is made by looking."""
    code, out, err = cli("alerts")
    assert (code, out, err.strip()) == (0, "", "No alert is open.")


def test_what_an_event_said_does_not_command_the_terminal(cli, listed):
    """Messages quote exceptions, and those quote events."""
    listed("login", "blocked", "t/0", "ValueError: \x1b[2Jgone\nnext\tcell")
    _, out, _ = cli("alerts")
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    assert "\\x1b[2Jgone\\nnext\\tcell" in out
