"""Pause and resume: what a person keeps waiting is not leased, whoever restarts what."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import psycopg
import pytest

from sideline import Pipeline
from sideline.engine.lease import Lease, Partition, PartitionReport, Report
from sideline.engine.pulse import Pulse
from sideline.errors import PartialError, RefusedError
from sideline.ledger import pausing
from sideline.ledger.connection import connect
from tests.support.desk import prepare
from tests.support.pipelines import (
    applied,
    execute,
    faults,
    numbered,
    publish,
    query,
    recorder,
)
from tests.support.waiting import wait_for


@pytest.fixture
def known(database) -> str:
    """A pipeline ``login`` with partitions of two topics; the database's URL."""
    prepare(database)
    execute(
        database,
        "insert into sideline.pipelines (name, epoch) values ('login', 7)",
        "insert into sideline.progress (pipeline, topic, partition, next_offset) values"
        " ('login', 'users', 0, 0), ('login', 'users', 1, 0), ('login', 'mails', 0, 0)",
    )
    return database


def paused(database: str) -> set[str]:
    rows = query(database, "select topic, partition from sideline.progress where paused")
    return {f"{topic}/{number}" for topic, number in rows}


# The command


def test_a_pipeline_is_paused_and_resumed(cli, known):
    """Once, twice, and back; status says who and why."""
    code, out, err = cli("pause", "login", "--reason", "deploying the new handler")
    assert (code, out, err) == (0, "", "login is paused.\n")
    ((flag, note),) = query(known, "select paused, paused_note from sideline.pipelines")
    assert flag
    assert note.endswith(f"@{socket.gethostname()}: deploying the new handler")

    code, _, err = cli("pause", "login")
    assert (code, err) == (0, "login was paused already.\n")
    code, out, err = cli("status")
    assert "stopped, paused" in out
    assert "everything is paused (by " in err

    code, _, err = cli("resume", "login")
    assert (code, err) == (0, "login goes on.\n")
    assert query(known, "select paused, paused_note from sideline.pipelines") == [(False, None)]
    code, _, err = cli("resume", "login")
    assert (code, err) == (0, "login was not paused.\n")


def test_partitions_are_paused_by_themselves(cli, known):
    """By topic and number, or by the number where one topic has it."""
    assert cli("pause", "login", "--partition", "users/0", "--partition", "1")[0] == 0
    assert paused(known) == {"users/0", "users/1"}
    assert query(known, "select paused from sideline.pipelines") == [(False,)]
    _, _, err = cli("status")
    assert "users/0, users/1 is paused (users/0, 1 by " in err

    code, out, _ = cli("resume", "login", "--partition", "users/0", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["paused"], found["partitions"]) == (False, ["users/1"])
    assert found["changed"] == ["users/0"]
    assert "users/0, 1 by" in found["note"]
    cli("resume", "login", "--partition", "1")
    assert paused(known) == set()
    assert query(known, "select paused_note from sideline.pipelines") == [(None,)]


def test_what_is_still_paused_is_said(cli, known):
    """Resuming the whole leaves partitions that somebody paused for a reason, and says so."""
    cli("pause", "login", "--partition", "users/0")
    cli("pause", "login")
    _, _, err = cli("resume", "login", "--partition", "users/0")
    assert "users/0 goes on." in err
    assert "login as a whole is paused: sideline resume login" in err
    cli("pause", "login", "--partition", "users/1")
    _, _, err = cli("resume", "login")
    assert "login goes on." in err
    assert "sideline resume login --partition users/1" in err


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_what_is_unsent_is_said(cli, known, command):
    """Whoever pauses learns that records still leave, of all partitions, and how many (K23)."""
    assert "sent" not in cli(command, "login")[2]
    execute(
        known, "update sideline.progress set outbox_last = 7, outbox_sent = 6 where topic = 'mails'"
    )
    assert (
        "1 record of login waits to be sent; while it runs it is sent, paused or not.\n"
        in cli(command, "login")[2]
    )
    execute(known, "update sideline.progress set outbox_last = 1000 where topic = 'users'")
    assert (
        "2,001 records of login wait to be sent; while it runs they are sent, paused or not.\n"
        in cli(command, "login", "--partition", "users/0")[2]
    )
    assert json.loads(cli(command, "login", "--json")[1])["unsent"] == 2_001


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nobody",), 4, "no pipeline 'nobody' has run with this database"),
        (("login", "--partition", "users/9"), 4, "has no partition users/9"),
        (("login", "--partition", "9"), 4, "has no partition 9"),
        (("login", "--partition", "orders/0"), 4, "has no partition orders/0"),
        (("login", "--partition", "0"), 2, "has 2 partitions 0: mails/0, users/0"),
        (("login", "--partition", "first"), 2, "'first' is not a partition"),
        (("login", "--partition", "users/-1"), 2, "is not a partition"),
        (("login", "--partition", "users/1", "--partition", "9"), 4, "has no partition 9"),
    ],
)
@pytest.mark.parametrize("command", ["pause", "resume"])
def test_what_is_not_there_cannot_be_paused(cli, known, command, arguments, code, words):
    """In a sentence, with nothing changed."""
    found, out, err = cli(command, *arguments)
    assert found == code
    assert words in err
    assert out == ""
    assert paused(known) == set()


def test_a_database_without_a_ledger_knows_no_pipeline(cli):
    """Nothing is made by asking."""
    assert cli("pause", "login")[0] == 4


def test_a_reason_is_one_line_that_a_terminal_can_show(cli, known):
    """Whatever was pasted."""
    cli("pause", "login", "--reason", "a\x1b[2J\nb\x07\tc" + "x" * 9_000)
    ((note,),) = query(known, "select paused_note from sideline.pipelines")
    assert "a[2J b cxxx" in note
    assert len(note) <= 500


def test_a_row_that_a_frozen_worker_holds_is_not_waited_for(known, monkeypatch):
    """Refused after a while; nothing is changed by half."""
    monkeypatch.setattr(pausing, "LOCK_TIMEOUT", "100ms")
    with psycopg.connect(known) as frozen, connect(known, role="test") as connection:
        frozen.execute("select * from sideline.progress where topic = 'users' for update")
        with pytest.raises(RefusedError, match="holds its row"):
            pausing.pause(connection, "login", ["mails/0", "users/1"], who="me")
    assert paused(known) == set()


# Workers


def test_a_worker_hears_of_pauses_while_it_works(known):
    """At once, without a question per slice; a paused pipeline only sends what it committed."""
    with connect(known, role="test") as connection:
        pulse = Pulse(known, "login")
        try:
            pulse.start(7, connection)
            assert pulse.paused == frozenset()
            pausing.pause(connection, "login", ["users/1"], who="me")
            wait_for(lambda: pulse.paused, what="the pause")
            assert pulse.paused == {Partition("users", 1)}
            assert not pulse.stop_wanted.is_set()
            pausing.resume(connection, "login", ["users/1"], who="me")
            wait_for(lambda: not pulse.paused, what="the end of the pause")
            pausing.pause(connection, "login", who="me")
            wait_for(lambda: pulse.all_paused, what="the pause of all")
            assert not pulse.stop_wanted.is_set()
            # The next lease of a worker that lived on begins where the ledger says.
            pulse.rest()
            pausing.resume(connection, "login", who="me")
            pulse.start(7, connection)
            assert not pulse.all_paused
        finally:
            pulse.close()


# The driver


def test_a_paused_partition_is_not_leased_until_it_is_resumed(desk, topics, database, caplog):
    """The others go on; no restart is needed for either."""
    topic = topics(partitions=3)
    one, two = Partition(topic, 1), Partition(topic, 2)
    driver = desk(Pipeline("picky", topics=topic))
    wait_for(lambda: driver.leased, what="a round")
    with connect(database, role="test") as connection:
        pausing.pause(connection, "picky", ["1"], who="zoey", reason="it smells")
        wait_for(lambda: one not in driver.leased[-1], what="a round without it")
        assert two in driver.leased[-1]
        assert driver.driver.troubles["paused"] == f"{topic}/1 (1 by zoey: it smells)"
        pausing.resume(connection, "picky", ["1"], who="zoey")
        wait_for(lambda: one in driver.leased[-1], what="a round with it")
    assert "paused" not in driver.driver.troubles
    assert caplog.text.count("picky: paused: ") == 1
    assert "picky: nothing is paused any more" in caplog.text


def test_a_paused_pipeline_survives_restarts_and_says_so(desk, topics, database):
    """No round at all, by this driver or the next, until it is resumed."""
    topic = topics(partitions=2)
    first = desk(Pipeline("patient", topics=topic))
    wait_for(lambda: first.leased, what="a round")
    with connect(database, role="test") as connection:
        pausing.pause(connection, "patient", who="zoey")
        wait_for(lambda: first.driver.troubles.get("paused"), what="the pause")
        assert first.stop() is None

        second = desk(Pipeline("patient", topics=topic))
        wait_for(lambda: second.driver.troubles.get("paused"), what="the pause")
        assert second.driver.troubles["paused"] == "everything (by zoey)"
        assert second.leased == []
        pausing.resume(connection, "patient", who="zoey")
        wait_for(lambda: second.leased, what="a round")


def done(topic: str) -> Callable[[Lease], Report]:
    """A round that does all there is."""

    def work(lease: Lease) -> Report:
        parts = [
            PartitionReport(topic, s.partition, taken=True, next_offset=s.bound, consumed=1)
            for s in lease.shares
        ]
        return Report(lease.round, partitions=parts)

    return work


def test_once_ends_with_exit_code_7_and_names_what_was_left(desk, topics, kafka, database):
    """Everything else is done first; nobody has to guess what is missing."""
    topic = topics(partitions=3)
    for number in range(3):
        publish(kafka, topic, numbered(5), partition=number)
    desk(Pipeline("partial", topics=topic), lambda lease: Report(lease.round)).stop()
    with connect(database, role="test") as connection:
        pausing.pause(connection, "partial", ["1"], who="zoey")
    driver = desk(Pipeline("partial", topics=topic), done(topic), once=True)
    error = driver.end()
    assert isinstance(error, PartialError)
    assert error.exit_code == 7
    assert f"not all was read of {topic}/1." in error.message
    assert "sideline status partial" in error.hint
    assert set.union(*driver.leased) == {Partition(topic, 0), Partition(topic, 2)}
    # A person's wish is neither a failure nor an alert.
    assert query(database, "select state, note from sideline.pipelines") == [("stopped", None)]
    assert driver.alerts() == []


def test_once_of_a_paused_pipeline_ends_at_once(desk, topics, kafka, database):
    """Without a round; with nothing to do it is simply done."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    desk(Pipeline("whole", topics=topic), lambda lease: Report(lease.round)).stop()
    with connect(database, role="test") as connection:
        pausing.pause(connection, "whole", who="zoey")
    driver = desk(Pipeline("whole", topics=topic), done(topic), once=True)
    assert isinstance(driver.end(), PartialError)
    assert driver.leased == []
    execute(database, "update sideline.progress set next_offset = 5, consumed = 5, applied = 5")
    assert desk(Pipeline("whole", topics=topic), done(topic), once=True).end() is None


def sending(topic: str, left: list[int]) -> Callable[[Lease], Report]:
    """A round that reads nothing, and says how many records it could not send."""

    def work(lease: Lease) -> Report:
        parts = [
            PartitionReport(topic, s.partition, taken=True, next_offset=0, unsent=left[0])
            for s in lease.shares
        ]
        return Report(lease.round, partitions=parts)

    return work


def test_a_stop_says_what_is_unsent(desk, topics, database, caplog):
    """Paused, it still has rounds for the outbox; at the end it says what they left (K23)."""
    topic = topics(partitions=1)
    left = [0]
    first = desk(Pipeline("sender", topics=topic), sending(topic, left))
    wait_for(lambda: len(first.leased) > 1, what="a round that was folded")
    assert first.stop() is None
    assert "to be sent" not in caplog.text
    with connect(database, role="test") as connection:
        pausing.pause(connection, "sender", who="zoey")

    left[0] = 1_234
    first.rows(outbox_last=1_234)
    second = desk(Pipeline("sender", topics=topic), sending(topic, left))
    wait_for(lambda: len(second.leased) > 1, what="rounds of a paused pipeline")
    assert second.stop() is None
    said = "1,234 records wait to be sent; the next run sends what this one could not"
    assert caplog.text.count(f"sender: {said}") == 1

    left[0] = 1
    second.rows(outbox_last=1)
    third = desk(Pipeline("sender", topics=topic), sending(topic, left))
    wait_for(lambda: len(third.leased) > 1, what="rounds of a paused pipeline")
    assert third.stop() is None
    assert "sender: 1 record waits to be sent; " in caplog.text


# Everything together


def test_a_running_pipeline_pauses_within_seconds_and_goes_on(start, ready, kafka, topics):
    """Workers let go at a slice boundary; nothing is lost or done twice (C1, C2)."""
    topic = topics(partitions=2)
    running = start(recorder("nap", topic))
    sent = publish(kafka, topic, numbered(20), partition=0)
    sent += publish(kafka, topic, numbered(20), partition=1)
    database = ready.database
    wait_for(lambda: len(applied(database)) == 40, what="the first events", within_seconds=120)
    free = "select count(*) from sideline.progress where released and partition = any(%s)"

    with connect(database, role="test") as connection:
        pausing.pause(connection, "nap", ["1"], who="zoey")
        wait_for(lambda: query(database, free, [1]) == [(1,)], what="the end of its lease")
        sent += publish(kafka, topic, numbered(20), partition=1)
        sent += publish(kafka, topic, numbered(20), partition=0)
        wait_for(lambda: len(applied(database)) == 60, what="events of the other partition")
        pausing.pause(connection, "nap", who="zoey")
        wait_for(lambda: query(database, free, [0, 1]) == [(2,)], what="the end of all leases")
        wait_for(
            lambda: "everything" in running.status()["troubles"].get("paused", ""), what="the word"
        )
        sent += publish(kafka, topic, numbered(20), partition=0)
        pausing.resume(connection, "nap", who="zoey")
        wait_for(lambda: len(applied(database)) == 80, what="events after the pause")
        assert {effect.partition for effect in applied(database)[60:]} == {0}
        pausing.resume(connection, "nap", ["1"], who="zoey")
    wait_for(lambda: len(applied(database)) == 100, what="events of the paused partition")
    assert faults(applied(database), sent) == []
    assert running.is_alive
