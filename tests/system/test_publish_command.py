"""`sideline publish`: what was exported comes back byte by byte; bad lines publish nothing."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import uuid

import pytest
from confluent_kafka.admin import AdminClient

from tests.support.ledger_rows import Failed
from tests.support.records import records

ANY_BYTES = bytes(range(256))
PARKED = [
    (b"", b"", [("", b""), ("", None)]),
    (ANY_BYTES, ANY_BYTES, [("a", ANY_BYTES), ("b", None), ("a", b"x"), ("Zo\u00eb\u202e", b"")]),
    ("Zoë".encode(), None, []),
    (b"k", b'{"a": 1}\n', [("message-id", b"old")]),
]
FAILED = Failed("ValueError", "cannot spell Zoë", "f" * 8)
AT_MS = 1_790_000_000_000


@pytest.fixture
def kafka_cli(cli, kafka, monkeypatch):
    """Commands that know the broker."""
    monkeypatch.setenv("SIDELINE_KAFKA", kafka)
    return cli


@pytest.fixture
def stdin(monkeypatch):
    """Give commands something to read."""

    def give(text: bytes) -> None:
        class Given:
            buffer = io.BytesIO(text)

        monkeypatch.setattr(sys, "stdin", Given)

    return give


def test_what_was_exported_is_published_byte_by_byte(rows, kafka_cli, topics, kafka, tmp_path):
    """Key, value, headers with order and duplicates, and on request the timestamp (P1, F13)."""
    topic = topics(partitions=1)
    for offset, (key, value, headers) in enumerate(PARKED):
        place = ("users", 0, offset)
        at = AT_MS + offset
        rows.park(key, place, FAILED, value=value, headers=headers, timestamp_ms=at)
    rows.commit()
    assert kafka_cli("parked", "export", "login", "--out", "events.jsonl")[0] == 0

    code, out, err = kafka_cli("publish", topic, "events.jsonl", "--keep-timestamps", "--json")

    assert code == 0, out + err
    assert json.loads(out)["published"] == 4
    found = records(kafka, topic)
    assert [(one.key(), one.value(), one.headers() or []) for one in found] == PARKED
    assert [one.timestamp()[1] for one in found] == [AT_MS + offset for offset in range(4)]
    assert kafka_cli("publish", topic, "events.jsonl")[0] == 0
    again = records(kafka, topic)[4:]
    assert [(one.key(), one.value(), one.headers() or []) for one in again] == PARKED
    assert all(one.timestamp()[1] > AT_MS + 10 for one in again)


def test_values_are_published_with_their_key_and_new_ids(kafka_cli, topics, kafka, stdin):
    """From stdin, at a rate; bytes as they stand, blank lines left out (P1)."""
    topic = topics(partitions=1)
    stdin('{"id": 1, "name":"Zoë"}\n\n{"id":"b"}'.encode())

    code, _, err = kafka_cli("publish", topic, "--key-field", "id", "--rate", "1000")

    assert code == 0, err
    assert "2 records published" in err
    one, two = records(kafka, topic)
    assert (one.key(), one.value()) == (b"1", '{"id": 1, "name":"Zoë"}'.encode())
    assert (two.key(), two.value()) == (b"b", b'{"id":"b"}')
    assert [name for name, _ in two.headers()] == ["message-id", "correlation-id"]


def test_a_file_with_a_bad_line_publishes_nothing(kafka_cli, topics, kafka, tmp_path):
    """Every line is looked at before the first one goes; its number is named (P1)."""
    topic = topics(partitions=1)
    (tmp_path / "lines").write_bytes(b'{"id": 1}\n{"id": \n{"id": 3}\n{"name": 4}\n')

    code, _, err = kafka_cli("publish", topic, "lines", "--key-field", "id")

    assert code == 2
    assert "line 2 is not JSON" in err
    assert "line 4 has no key" in err
    assert "nothing was published" in err
    assert records(kafka, topic) == []
    code, _, err = kafka_cli("publish", topic, "lines")
    assert code == 2
    assert "--key-field" in err


def test_a_bad_line_of_stdin_ends_it_and_says_how_many_went(kafka_cli, topics, kafka, stdin):
    """What stood before it is published, and it can go on behind it (P1; exit 7)."""
    topic = topics(partitions=1)
    text = b'{"id": 1}\n{"id": 2}\nnonsense\n{"id": 3}\n'
    stdin(text)

    code, _, err = kafka_cli("publish", topic, "--key-field", "id")

    assert code == 7
    assert "line 3 is not JSON" in err
    assert "2 records before it" in err
    stdin(text.replace(b"nonsense", b'{"id": 0}'))
    assert kafka_cli("publish", topic, "--key-field", "id", "--from-line", "3")[0] == 0
    assert [one.key() for one in records(kafka, topic)] == [b"1", b"2", b"0", b"3"]
    stdin(b"nonsense")
    assert kafka_cli("publish", topic, "--key-field", "id")[0] == 2


def test_a_pipe_by_name_is_read_once(kafka_cli, topics, kafka, tmp_path):
    """What cannot be read twice is published as it comes (P1)."""
    topic = topics(partitions=1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"id": 1}\n{"id": 2}\n',))
    writer.start()

    code, _, err = kafka_cli("publish", topic, "pipe", "--key-field", "id")

    writer.join()
    assert code == 0, err
    assert [one.key() for one in records(kafka, topic)] == [b"1", b"2"]


def test_a_record_that_is_not_even_taken_ends_it(kafka_cli, topics, kafka, tmp_path):
    """It is named by its line, and what went before it is counted (P1; exit 7)."""
    topic = topics(partitions=1)
    big = json.dumps({"id": 2, "noise": "x" * (65 << 20)})
    (tmp_path / "lines").write_text(f'{{"id": 1}}\n{big}\n{{"id": 3}}\n')

    code, _, err = kafka_cli("publish", topic, "lines", "--key-field", "id")

    assert code == 7
    assert "line 2 was not taken" in err
    assert "1 record before it" in err
    assert [one.key() for one in records(kafka, topic)] == [b"1"]


def test_a_missing_topic_is_refused_and_not_made(kafka_cli, kafka, stdin, tmp_path):
    """Exit 4, whatever the broker would do by itself (P1)."""
    name = f"missing-{uuid.uuid4().hex[:8]}"
    stdin(b'{"id": 1}')

    code, out, _ = kafka_cli("publish", name, "--key-field", "id", "--json")

    assert code == 4
    assert json.loads(out)["error"] == "not-found"
    assert name not in AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=30).topics
    assert kafka_cli("publish", name, "nowhere.jsonl", "--key-field", "id")[0] == 4


def test_records_that_do_not_arrive_are_named_by_line(kafka_cli, topics, kafka, tmp_path):
    """The others are published, and counted (P1; exit 7)."""
    topic = topics(partitions=1)
    big = json.dumps({"id": 2, "noise": [uuid.uuid4().hex for _ in range(60_000)]})
    (tmp_path / "lines").write_text(f'{{"id": 1}}\n{big}\n{{"id": 3}}\n')

    code, _, err = kafka_cli("publish", topic, "lines", "--key-field", "id")

    assert code == 7
    assert "2 records published, 1 not delivered (line 2)" in err
    assert [one.key() for one in records(kafka, topic)] == [b"1", b"3"]


@pytest.mark.parametrize(
    "options",
    [
        ["--values"],
        ["--key-field", "id", "--keyless"],
        ["--key-field", "id", "--keep-timestamps"],
        ["--rate", "0"],
        ["--from-line", "0"],
    ],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_refused(kafka_cli, stdin, options):
    """Before anything is connected (P1; exit 2)."""
    stdin(b"")
    assert kafka_cli("publish", "users", *options)[0] == 2


def test_a_dry_run_publishes_nothing(kafka_cli, topics, kafka, stdin):
    """It checks the topic and every line (P1)."""
    topic = topics(partitions=1)
    stdin(b'{"id": 1}\n{"id": 2}\n')

    code, _, err = kafka_cli("publish", topic, "--key-field", "id", "--dry-run")

    assert code == 0
    assert "2 lines are fit" in err
    assert records(kafka, topic) == []


def test_a_rate_is_kept(kafka_cli, topics, stdin, kafka):
    """So many records a second at most: eleven of them at ten a second take their time (P1)."""
    topic = topics(partitions=1)
    stdin(b"".join(b"%d\n" % n for n in range(11)))
    how = ("--values", "--keyless", "--rate", "10", "--json")
    code, out, err = kafka_cli("publish", topic, "-", *how)
    assert code == 0, out + err
    # The eleventh has its turn one second after the first, by the clock that may be a little early.
    assert json.loads(out)["seconds"] >= 0.9
    assert [one.value() for one in records(kafka, topic)] == [b"%d" % n for n in range(11)]
