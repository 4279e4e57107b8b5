"""`sideline parked` on a real ledger: lists, pages, one event, and exports that are exact."""

from __future__ import annotations

import base64
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from itertools import product

import psycopg
import pytest

from sideline import parked, views
from sideline.ledger.reading import opened
from sideline.ledger.sql import migrations, queries
from tests.support.ledger_rows import BEGIN, Failed, Rows
from tests.support.watched import Watched

ANY_BYTES = bytes(range(256))
EVIL = "\x1b[2Jboo\x9b31m\u202egnp\x07"
SPELLING = Failed()
CONSTRAINT = Failed(
    error="psycopg.errors.CheckViolation",
    message="new row violates check constraint",
    place="constraint age_check on users",
    fingerprint="ba9876543210",
    stage="write",
)


@pytest.fixture
def story(rows):
    """Zoë failed, Zoiee follows; a constraint caught Bob; an event without a key failed too."""
    rows.park(b"zoey", ("users", 2, 1), SPELLING)
    rows.park(b"bob", ("users", 0, 7), CONSTRAINT)
    rows.park(b"zoey", ("users", 2, 5))
    rows.park(None, ("users", 1, 3), SPELLING)
    rows.park(b"\xff\x00", ("orders", 0, 2**62 + 1), CONSTRAINT, pipeline="shop")
    rows.commit()
    return rows


def ids(page) -> list[str]:
    return [event["id"] for event in page["events"]]


def test_keys_say_what_waits_since_when_and_why(story, cli, read):
    """A key, its events, and the cause of the first; oldest first; a null key is no key (S1)."""
    found = read("parked", "keys", "login")
    assert [(key["key"], key["events"], key["head"]["id"]) for key in found["keys"]] == [
        ({"text": "zoey"}, 2, "users/2/1"),
        ({"text": "bob"}, 1, "users/0/7"),
    ]
    assert found["keys"][0]["head"]["cause"] == SPELLING.fingerprint
    assert found["next"] is None
    code, out, err = cli("parked", "keys", "login")
    assert code == 0
    assert out.splitlines() == [
        "key\ttopic\tevents\tsince\tcause",
        "zoey\tusers\t2\t2026-01-31T12:00:01Z\tValueError: cannot spell this",
        f"bob\tusers\t1\t2026-01-31T12:00:02Z\t{CONSTRAINT.error}: {CONSTRAINT.message}",
    ]
    assert "login: 4 events parked, 2 keys aside." in err


def test_without_a_name_every_pipeline_is_listed(story, cli, read):
    """The pipeline is then the first column."""
    assert [key["pipeline"] for key in read("parked", "keys")["keys"]] == ["login", "login", "shop"]
    _, out, _ = cli("parked", "keys")
    assert out.splitlines()[0].startswith("pipeline\t")
    assert out.splitlines()[3].startswith("shop\t0xff00\torders\t1\t")


def test_causes_say_how_many_and_which_share(story, rows, read):
    """Counted by cause over partitions, from the counters, with an example (S1)."""
    found = read("parked", "causes", "login")["causes"]
    assert [(cause["cause"], cause["parked"], cause["share"]) for cause in found] == [
        (SPELLING.fingerprint, 2, 0.6667),
        (CONSTRAINT.fingerprint, 1, 0.3333),
    ]
    assert found[0]["example"] == "users/1/3"
    assert found[0]["place"] == SPELLING.place
    assert found[0]["message"] == SPELLING.message
    assert found[0]["first_at"] < found[0]["last_at"]
    rows.connection.execute("update sideline.causes set parked = 0 where pipeline = 'shop'")
    rows.commit()
    assert read("parked", "causes", "shop")["causes"] == []


def test_events_are_listed_oldest_first(story, read):
    """Failed ones with their error, followers without one (F4)."""
    found = read("parked", "list", "login")
    assert ids(found) == ["users/2/1", "users/0/7", "users/2/5", "users/1/3"]
    assert [event["why"] for event in found["events"]] == ["failed", "failed", "follows", "failed"]
    assert found["events"][2]["error"] is None
    shop = read("parked", "list", "shop")["events"][0]
    assert shop["offset"] == 2**62 + 1
    assert shop["key"] == {"hex": "ff00"}


AGO = "2026-01-31T12:00:{}Z"


FILTERED_EVENTS = [
    (["--topic", "orders"], ["orders/0/4611686018427387905"]),
    (["--topic", "nothing"], []),
    (["--key", "zoey"], ["users/2/1", "users/2/5"]),
    (["--key", "nobody"], []),
    (["--key-hex", "ff00"], ["orders/0/4611686018427387905"]),
    (["--key-hex", "0x626f62"], ["users/0/7"]),
    (["--key", "zoey", "--topic", "orders"], []),
    (["--cause", SPELLING.fingerprint], ["users/2/1", "users/1/3"]),
    (["--cause", "ValueError"], ["users/2/1", "users/1/3"]),
    (["--cause", "CheckViolation"], ["users/0/7", "orders/0/4611686018427387905"]),
    (["--cause", "CheckViolation", "--topic", "users"], ["users/0/7"]),
    (["--cause", "ValueError", "--key", "zoey"], ["users/2/1"]),
    (["--since", AGO.format("03")], ["users/2/5", "users/1/3", "orders/0/4611686018427387905"]),
    (["--until", AGO.format("03")], ["users/2/1", "users/0/7"]),
    (["--until", AGO.format("02"), "--key", "zoey"], ["users/2/1"]),
    (["--since", AGO.format("02"), "--cause", "ValueError"], ["users/1/3"]),
    (["--since", "1s"], []),
]


def test_filters_of_lists_and_exports(story, cli, read):
    """By topic, key, cause and time, and together; an export takes the same ones."""
    for filters, expected in FILTERED_EVENTS:
        assert ids(read("parked", "list", *filters)) == expected, filters
        code, out, _ = cli("parked", "export", *filters)
        assert code == 0, filters
        lines = [json.loads(line) for line in out.splitlines()]
        exported = [f"{line['topic']}/{line['partition']}/{line['offset']}" for line in lines]
        assert exported == expected, filters


FILTERED_KEYS = [
    (["--topic", "users"], ["zoey", "bob"]),
    (["--key", "bob"], ["bob"]),
    (["--key", "bob", "--cause", "ValueError"], []),
    (["--cause", "ValueError"], ["zoey"]),
    (["--cause", "CheckViolation", "--topic", "users"], ["bob"]),
    (["--since", AGO.format("02"), "--topic", "users"], ["bob"]),
    (["--until", AGO.format("02")], ["zoey"]),
    (["--until", AGO.format("02"), "--key", "bob"], []),
]


def test_filters_of_keys(story, read):
    """A cause is the first event's; a time is since when the key is aside."""
    for filters, expected in FILTERED_KEYS:
        found = read("parked", "keys", *filters)["keys"]
        assert [key["key"]["text"] for key in found] == expected, filters


FILTERED_CAUSES = [
    (["--key", "zoey"], [SPELLING]),
    (["--key", "nobody"], []),
    (["--cause", "CheckViolation"], [CONSTRAINT, CONSTRAINT]),
    (["--topic", "orders"], [CONSTRAINT]),
    (["--since", AGO.format("04"), "login"], [SPELLING]),
    (["--until", AGO.format("02"), "login"], [SPELLING]),
]


def test_filters_of_causes(story, read):
    """By what was seen in the time; by what a key waits for."""
    for filters, expected in FILTERED_CAUSES:
        found = read("parked", "causes", *filters)["causes"]
        fingerprints = [cause.fingerprint for cause in expected]
        assert [cause["cause"] for cause in found] == fingerprints, filters


def test_a_key_of_two_kinds_is_found_by_either(rows, read):
    """What key= said and a record's own key are two keys, and both answer to their text (K15)."""
    rows.park(b"record", ("users", 0, 1), SPELLING, derived=b"zoey")
    rows.park(b"zoey", ("users", 0, 2), SPELLING)
    rows.commit()
    found = read("parked", "keys", "--key", "zoey")["keys"]
    assert sorted((key["derived"], key["head"]["id"]) for key in found) == [
        (False, "users/0/2"),
        (True, "users/0/1"),
    ]
    assert ids(read("parked", "list", "--key", "zoey")) == ["users/0/1", "users/0/2"]


def test_an_empty_key_is_a_key(rows, read):
    """--key '' does not mean any."""
    rows.park(b"", ("users", 0, 1), SPELLING)
    rows.park(b"zoey", ("users", 0, 2), SPELLING)
    rows.commit()
    assert ids(read("parked", "list", "--key", "")) == ["users/0/1"]
    assert ids(read("parked", "list", "--key-hex", "")) == ["users/0/1"]


def test_pages_cover_a_list_without_gaps_or_repeats(rows, read):
    """Also where many stepped aside in one moment, over pipelines, and in joined queues."""
    for number in range(7):
        rows.at = BEGIN + timedelta(seconds=number // 3)
        cause = Failed(fingerprint=f"{number:012}")
        rows.park(b"k%d" % number, ("users", 0, number), cause, pipeline=f"p{number % 2}")
    # Two keys that wait for the same event: one queue.
    rows.connection.execute(
        "insert into sideline.keys select pipeline, topic, gen_random_uuid(), key, true, queue, 1"
        " from sideline.keys where pipeline = 'p1'"
    )
    rows.commit()
    kinds = {"keys": ("keys", 10), "list": ("events", 7), "causes": ("causes", 7)}
    for (what, (name, count)), filters in product(kinds.items(), [[], ["--cause", "ValueError"]]):
        whole = read("parked", what, *filters)
        assert len(whole[name]) == count
        assert whole["next"] is None
        for limit in (1, 2, 3, count, 100):
            assert paged(read, name, ["parked", what, *filters], limit) == whole[name]


def paged(read, name: str, arguments: list[str], limit: int) -> list:
    """Everything of a list, page by page."""
    found, after = [], []
    while after is not None:
        page = read(*arguments, "--limit", str(limit), *after)
        assert len(page[name]) <= limit
        found += page[name]
        after = None if page["next"] is None else ["--after", page["next"]]
    return found


def test_pages_of_a_key_follow_the_order_of_replay(rows, read):
    """Whatever their times say: an event that came back keeps its place (R3)."""
    rows.park(b"zoey", ("users", 0, 1), SPELLING, generation=2)
    for offset in range(2, 6):
        rows.park(b"zoey", ("users", 0, offset), parked_at=BEGIN)
    rows.commit()
    page = read("parked", "list", "--key", "zoey", "--limit", "3")
    assert ids(page) == ["users/0/1", "users/0/2", "users/0/3"]
    rest = read("parked", "list", "--key", "zoey", "--limit", "3", "--after", page["next"])
    assert ids(rest) == ["users/0/4", "users/0/5"]
    assert rest["next"] is None


def test_the_next_page_is_said_in_words(story, cli):
    """The token stands on stderr: stdout is the table alone."""
    code, out, err = cli("parked", "list", "login", "--limit", "1")
    assert code == 0
    assert len(out.splitlines()) == 2
    token = err.rpartition("--after ")[2].strip()
    _, out, _ = cli("parked", "list", "login", "--limit", "1", "--after", token)
    assert out.splitlines()[1].startswith("users/0/7")


WRONG = [
    (["keys", "nope"], 4, "no pipeline 'nope' has run"),
    (["list", "--cause", "KeyError"], 4, "nothing has failed by 'KeyError'"),
    (["list", "--after", "x"], 2, "'x' is not where a page of this list ended"),
    (["list", "--after", "W10"], 2, "is not where a page"),
    (["list", "--since", "yesterday"], 2, "--since is 'yesterday'"),
    (["list", "--until", "2026-01-31T12:00:00"], 2, "neither a time with its zone nor an age"),
    (["list", "--key-hex", "0"], 2, "not hexadecimal"),
    (["list", "--key", "a", "--key-hex", "00"], 2, "a key is given twice"),
    (["list", "--limit", "0"], 2, "--limit"),
    (["show", "users/2"], 2, "'users/2' is not an event's id"),
    (["show", "users/2/99999999999999999999"], 2, "is not an event's id"),
    (["show", "users/2/9223372036854775808"], 2, "is not an event's id"),
    (["show", "users/4294967296/1"], 2, "is not an event's id"),
    (["show", "users/2/2"], 4, "event users/2/2 is not in the ledger"),
    (["show", "users/2/1", "shop"], 4, "event users/2/1 is not in the ledger"),
]


def test_what_cannot_be_shown_is_said_in_one_sentence(story, cli):
    """With the documented exit code and the next step."""
    for arguments, code, words in WRONG:
        found, out, err = cli("parked", *arguments)
        assert (found, out) == (code, ""), arguments
        assert words in err
        assert len(err.splitlines()) == 2, err


def test_a_token_of_another_list_is_refused(story, cli, read):
    """It would begin anywhere."""
    token = read("parked", "list", "--limit", "1")["next"]
    code, _, err = cli("parked", "keys", "--after", token)
    assert code == 2
    assert "is not where a page of this list ended" in err


def test_an_empty_database_and_an_old_ledger(database, cli, tmp_path):
    """No ledger: nothing waits. An older one: what to do."""
    code, out, err = cli("parked", "list")
    assert (code, out) == (0, "")
    assert "Nothing that was asked for is parked." in err
    assert cli("parked", "show", "users/0/1")[0] == 4
    assert cli("park", "users/0/1", "--reason", "x")[0] == 4
    assert cli("status", "--check")[0] == 0
    with psycopg.connect(database) as connection:
        connection.execute("create schema sideline")
        connection.execute("create table sideline.migrations (number int, name text)")
        connection.execute("insert into sideline.migrations values (1, 'progress')")
    for command in (["parked", "list"], ["park", "users/0/1", "--reason", "x"], ["status"]):
        code, _, err = cli(*command)
        assert code == 5
        assert "Run: sideline migrate" in err


@pytest.mark.parametrize("since", [2, 8])
def test_what_waits_survives_a_migration(database, cli, read, since):
    """From an early schema to the newest: every row as it was, the books in order (F13, S1)."""
    tables = ("events", "queues", "keys", "causes", "progress", "pipelines")
    with psycopg.connect(database) as connection:
        for step in migrations():
            if step.number <= since:
                connection.execute(step.sql)
                connection.execute(
                    queries()["record_migration"], {"number": step.number, "name": step.name}
                )
        rows = Rows(connection)
        rows.partition("login", "users", 2, consumed=9, applied=7, filtered=2, next_offset=30)
        headers = [("trace", b"abc"), ("trace", None), ("", ANY_BYTES)]
        rows.park(b"zoey", ("users", 2, 1), SPELLING, headers=headers, value=ANY_BYTES)
        rows.park(b"zoey", ("users", 2, 5), value=None)
        rows.park(ANY_BYTES, ("users", 0, 7), CONSTRAINT, attempts=3, generation=1)
        rows.park(None, ("users", 0, 8), SPELLING)
        before = {table: as_json(connection, table) for table in tables}
    assert cli("status", "--check")[0] == 5
    assert cli("migrate")[0] == 0
    with psycopg.connect(database) as connection:
        for table, found in before.items():
            after = as_json(connection, table)
            known = [{name: row[name] for name in found[0]} for row in after]
            assert sorted(map(repr, known)) == sorted(map(repr, found)), table
    assert read("status", "--check")["ok"] is True
    shown = read("parked", "show", "users/2/1")
    assert shown["queue"]["behind"] == ["users/2/5"]


def as_json(connection, table):
    """Its rows as they are now."""
    return [row for (row,) in connection.execute(f"select to_jsonb(t) from sideline.{table} as t")]


def test_show_tells_everything(rows, cli, read):
    """Key, headers in order with duplicates, times, value, why, and its place (F13, R2)."""
    headers = [("trace", b"abc"), ("trace", None), ("x\u202e", ANY_BYTES), ("", b"")]
    rows.park(b"zoey", ("users", 2, 1), SPELLING)
    rows.park(
        b"zoey",
        ("users", 2, 5),
        CONSTRAINT,
        headers=headers,
        value=ANY_BYTES,
        timestamp_ms=2**62,
        attempts=3,
        generation=2,
    )
    for offset in range(6, 14):
        rows.park(b"zoey", ("users", 2, offset))
    rows.commit()

    found = read("parked", "show", "users/2/5")
    assert found["key"] == {"text": "zoey"}
    assert [name for name, _ in found["headers"]] == [name for name, _ in headers]
    assert [value and views_bytes(value) for _, value in found["headers"]] == [
        value for _, value in headers
    ]
    assert views_bytes(found["value"]) == ANY_BYTES
    assert found["timestamp_ms"] == 2**62
    assert (found["attempts"], found["generation"]) == (3, 2)
    assert (found["error"], found["stage"]) == (CONSTRAINT.error, "write")
    assert found["traceback"] == CONSTRAINT.traceback
    queue = found["queue"]
    assert (queue["place"], queue["events"]) == (2, 10)
    assert queue["before"] == ["users/2/1"]
    assert queue["behind"] == [f"users/2/{offset}" for offset in range(6, 11)]

    code, out, _ = cli("parked", "show", "users/2/5")
    assert code == 0
    for words in (
        "users/2/5  parked (failed) in pipeline login",
        "place 2 of 10",
        "before   users/2/1 (failed)",
        "behind   users/2/6 (follows), users/2/7 (follows)",
        "generation 2",
        "attempts 3",
        "version 1a2b3c4d5e6f",
        "256 bytes",
        r'"x\u202e": 0x000102',
        "trace: -",
        "Traceback (most recent call last):",
    ):
        assert words in out


def views_bytes(value: dict[str, str]) -> bytes:
    return value["text"].encode() if "text" in value else bytes.fromhex(value["hex"])


def test_show_bounds_the_value_unless_it_is_asked_for(rows, cli, read):
    """A megabyte does not flood the screen; --full and --json have all of it."""
    rows.park(b"zoey", ("users", 0, 1), SPELLING, value="ë".encode() * 3_000)
    rows.park(None, ("users", 0, 2), SPELLING, value=None)
    rows.commit()
    _, out, _ = cli("parked", "show", "users/0/1")
    assert "6,000 bytes" in out
    assert "... 4,000 bytes more: --full" in out
    assert out.count("ë") == 1_000
    assert cli("parked", "show", "users/0/1", "--full")[1].count("ë") == 3_000
    assert len(read("parked", "show", "users/0/1")["value"]["text"]) == 3_000
    _, out, _ = cli("parked", "show", "users/0/2")
    assert "none: a tombstone" in out
    assert "none: nothing waits behind it" in out
    assert read("parked", "show", "users/0/2")["value"] is None


def test_show_asks_for_a_name_only_where_it_must(rows, cli, read):
    """Two pipelines may have parked the same event."""
    for pipeline in ("login", "shop"):
        rows.park(b"zoey", ("users", 0, 1), SPELLING, pipeline=pipeline)
    rows.park(b"zoey", ("users", 0, 2), pipeline="shop")
    rows.commit()
    code, _, err = cli("parked", "show", "users/0/1")
    assert code == 2
    assert "2 pipelines: login, shop" in err
    assert read("parked", "show", "users/0/1", "shop")["pipeline"] == "shop"
    assert read("parked", "show", "users/0/2")["pipeline"] == "shop"


def test_show_knows_an_id_of_a_topic_that_was_made_again(rows, cli, read):
    """The newest is shown, and the way to the older one is said."""
    rows.park(b"zoey", ("users", 0, 1), SPELLING, value=b"old")
    rows.park(b"bob", ("users", 0, 1), SPELLING, value=b"new", incarnation=1)
    rows.commit()
    assert read("parked", "show", "users/0/1")["value"] == {"text": "new"}
    assert "--incarnation 0" in cli("parked", "show", "users/0/1")[1]
    assert read("parked", "show", "users/0/1", "--incarnation", "0")["value"] == {"text": "old"}


@pytest.mark.parametrize(("before", "behind"), [(3, 50), (50, 3), (40, 40)])
def test_show_counts_from_the_nearer_end(rows, read, monkeypatch, before, behind):
    """A place is not counted through a million; in the middle of nowhere it is not known."""
    monkeypatch.setattr(parked, "MOST_COUNTED", 10)
    for offset in range(before + 1 + behind):
        rows.park(b"zoey", ("users", 0, offset), None if offset else SPELLING)
    rows.commit()
    found = read("parked", "show", f"users/0/{before}")["queue"]
    assert found["events"] == before + 1 + behind
    assert found["place"] == (None if min(before, behind) > 10 else before + 1)


@pytest.fixture
def evil(rows):
    """Everything that a stranger writes tries to command the terminal."""
    cause = Failed(error=EVIL, message=EVIL, place=EVIL, traceback=f"{EVIL}\n  {EVIL}\n")
    rows.park(
        EVIL.encode(),
        ("users", 0, 1),
        cause,
        value=f'{{"a": "{EVIL}"}}\r\n'.encode(),
        headers=[(EVIL, EVIL.encode())],
    )
    rows.park(b"\x9b\x1b[2J\xff", ("users", 0, 2), cause)
    rows.partition("login", "users", 1, trouble=EVIL, stuck_at=4)
    rows.connection.execute("update sideline.pipelines set note = %s", (EVIL,))
    rows.commit()
    return rows


COMMANDS = [
    (["parked", "keys"], 0),
    (["parked", "causes"], 0),
    (["parked", "list"], 0),
    (["parked", "show", "users/0/1"], 0),
    (["parked", "show", "users/0/2", "--full"], 0),
    (["parked", "export"], 0),
    (["parked", "keys", EVIL], 4),
    (["parked", "list", "--cause", EVIL], 0),
    (["parked", "list", "--cause", EVIL + "!"], 4),
    (["park", "users/1/4", "--reason", EVIL], 0),
    (["status", "login"], 0),
    (["status", "--check"], 0),
]


def obeyed(text: str) -> list[str]:
    return [sign for sign in text if not (sign.isprintable() or sign in "\n\t")]


def test_nothing_from_outside_commands_a_terminal(evil, cli):
    """No control character, escape sequence or direction override gets out (F13)."""
    for (arguments, expected), options in product(COMMANDS, [[], ["--json"]]):
        code, out, err = cli(*arguments, *options)
        assert code == expected, err
        assert obeyed(out + err) == [], arguments


def test_nothing_commands_a_real_terminal(evil, database, tmp_path):
    """The same where there is a terminal, and tables and blocks are drawn for people (F13)."""
    screen = on_terminal([arguments for arguments, _ in COMMANDS], database, tmp_path)
    assert obeyed(screen.replace("\r\n", "\n")) == []
    assert screen.count("\\x1b[2Jboo") > len(COMMANDS)


def on_terminal(commands: list[list[str]], database: str, directory) -> str:
    """What a terminal that understands no colours gets to see."""
    code = f"from sideline.cli import main\nfor command in {commands!r}: main.run(command)"
    ours, theirs = pty.openpty()
    environment = os.environ | {"SIDELINE_DATABASE": database, "TERM": "dumb", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=directory,
        env=environment,
    )
    os.close(theirs)
    seen = b""
    # EIO is a terminal's end of file.
    with suppress(OSError):
        while read := os.read(ours, 65536):
            seen += read
    os.close(ours)
    process.wait(60)
    return seen.decode()


def test_causes_on_a_terminal_read_like_sentences(story, database, tmp_path):
    """How many, what, where, since when, and an example to look at."""
    screen = on_terminal([["parked", "causes", "login"]], database, tmp_path)
    assert screen.replace("\r\n", "\n").startswith(
        "2 parked (67%): ValueError at app.py:17 in login\n"
        "    cannot spell this\n"
        "    first 2026-01-31T12:00:01Z, last 2026-01-31T12:00:04Z\n"
        "    cause 0123456789ab, for example users/1/3\n"
    )


RECORDS = [
    (None, None, []),
    (b"", b"", [("", b""), ("", None)]),
    (ANY_BYTES, ANY_BYTES, [("a", ANY_BYTES), ("b", None), ("a", b"x"), ("Zo\u00eb\u202e", b"")]),
    ("Zoë".encode(), b'{"a": 1}\n', [("trace\x7f\x9b", b"\n")]),
]


def exported(lines: str) -> list[tuple]:
    """A reader of exports, as anybody could write one."""

    def data(text: str | None) -> bytes | None:
        return None if text is None else base64.b64decode(text, validate=True)

    found = []
    for line in lines.splitlines():
        event = json.loads(line)
        headers = [(name, data(value)) for name, value in event["headers"]]
        found.append((data(event["key"]), data(event["value"]), headers, event["timestamp_ms"]))
    return found


@pytest.fixture
def records(rows):
    """Records of every shape, and what an export of them must hold."""
    for offset, (key, value, headers) in enumerate(RECORDS):
        rows.park(
            key,
            ("users", 0, 2**62 + offset),
            SPELLING,
            value=value,
            headers=headers,
            timestamp_ms=offset - 1,
        )
    rows.commit()
    return [(*record, offset - 1) for offset, record in enumerate(RECORDS)]


def test_an_export_gives_back_every_byte(records, cli, tmp_path):
    """Key, value, headers in order, null or empty, timestamp: exactly what was parked (F13)."""
    code, out, err = cli("parked", "export", "login")
    assert code == 0
    assert "4 events exported." in err
    assert exported(out) == records
    first = json.loads(out.splitlines()[0])
    assert (first["topic"], first["partition"], first["offset"]) == ("users", 0, 2**62)
    assert (first["why"], first["error"]) == ("failed", "ValueError")
    assert cli("parked", "export", "--json")[1] == out
    assert cli("parked", "export", "--out", "events.jsonl")[:2] == (0, "")
    assert (tmp_path / "events.jsonl").read_text() == out
    code, said, _ = cli("parked", "export", "--out", "other.jsonl", "--json")
    assert (code, json.loads(said)) == (0, {"events": 4, "file": "other.jsonl"})


def test_an_export_overwrites_only_when_told(records, cli, tmp_path):
    """Nor does it leave half a file, or replace what is no file."""
    (tmp_path / "mine").write_text("mine")
    code, _, err = cli("parked", "export", "--out", "mine")
    assert code == 5
    assert "--force" in err
    assert (tmp_path / "mine").read_text() == "mine"
    assert cli("parked", "export", "--out", "mine", "--force")[0] == 0
    assert exported((tmp_path / "mine").read_text()) == records
    (tmp_path / "link").symlink_to("mine")
    assert cli("parked", "export", "--out", "link", "--force", "--key", "nobody")[0] == 0
    assert (tmp_path / "mine").read_text() == ""
    assert (tmp_path / "link").is_symlink()
    for path in ("no/such/directory", "/dev/null"):
        assert cli("parked", "export", "--out", path, "--force")[0] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine"]


def test_an_export_that_breaks_off_leaves_nothing(records, rows, cli, tmp_path):
    """What cannot be had is not left out: a null would be a tombstone (F13)."""
    rows.connection.execute(
        "update sideline.events set value = null, held_in = 'stash' where key = ''"
    )
    rows.commit()
    code, _, err = cli("parked", "export", "--out", "events.jsonl")
    assert code == 2
    assert "Kafka" in err
    assert list(tmp_path.iterdir()) == []


def test_an_export_comes_in_batches_of_bounded_size(rows, database, monkeypatch):
    """Many small ones or a few big ones: memory holds a batch, and the order is replay's (C1)."""
    monkeypatch.setattr(parked, "EXPORT_EVENTS", 3)
    monkeypatch.setattr(parked, "EXPORT_BYTES", 1_000)
    for offset in range(8):
        rows.park(b"k%d" % (offset % 3), ("users", 0, offset), parked_at=BEGIN)
    rows.park(b"k0", ("users", 0, 8), value=b"x" * 600)
    rows.park(b"k0", ("users", 0, 9), value=b"x" * 600)
    rows.commit()
    sizes, offsets = [], []
    for batch in parked.export(rows.connection, views.Wanted()):
        sizes.append(len(batch))
        offsets += [event.offset for event in batch]
    assert sizes == [3, 3, 3, 1]
    assert offsets == list(range(10))


def test_an_export_is_of_one_moment(rows, database):
    """What is parked meanwhile is not in it, and what is released meanwhile is."""
    for offset in range(3):
        rows.park(b"k", ("users", 0, offset))
    rows.commit()
    with opened(database, role="test") as connection:
        batches = parked.export(connection, views.Wanted())
        assert parked.count_hint(connection, views.Wanted()) == 3
        rows.park(b"k", ("users", 0, 3))
        rows.connection.execute("update sideline.events set state = 'resolved', queue = null")
        rows.commit()
        assert [len(batch) for batch in batches] == [3]


# A million do not slow a list

FILTERS = {
    "all": views.Wanted(),
    "a topic": views.Wanted(topic="users"),
    "a key": views.Wanted(key=b"zoey"),
    "a cause": views.Wanted(cause="cause1"),
    "two causes": views.Wanted(cause="ValueError"),
    "a time": views.Wanted(since=BEGIN, until=BEGIN + timedelta(seconds=1)),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [200_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_page_costs_what_it_shows_however_much_is_parked(rows, count):
    """No scan, no sort and no count of all that waits, on the first page and in the middle."""
    rows.flood(count)
    rows.park(b"zoey", ("users", 0, count + 1), Failed(fingerprint="cause1"))
    watched = Watched(rows.connection)
    for name, wanted in FILTERS.items():
        for read in (parked.keys, parked.events, parked.causes):
            page = read(watched, wanted, limit=50)
            assert page.rows, (name, read)
            if page.after is not None:
                assert read(watched, wanted, limit=50, after=page.after).rows
    middle = views.Position("login", BEGIN + timedelta(seconds=5), count // 2)
    assert parked.events(watched, views.Wanted(), limit=50, after=middle.token("list")).rows
    parked.show(watched, views.EventId("users", 0, count // 2))
    assert watched.statements > 50
    assert watched.costly == []
