"""Lines that can be published, and what is wrong with others."""

from __future__ import annotations

import json

import pytest

from sideline import lines
from sideline.lines import BadLineError, Line

GOOD = {"key": "YQ==", "value": None, "headers": [["a", "Yg=="], ["a", None]], "timestamp_ms": 5}


def test_a_line_of_an_export_is_the_record_exactly():
    """Null stays null, headers keep order and duplicates; other fields are of no account (F13)."""
    line = json.dumps(GOOD | {"topic": "elsewhere", "why": "failed"}).encode()

    assert lines.record(line) == Line(b"a", None, (("a", b"b"), ("a", None)), 5)
    assert lines.record(json.dumps(GOOD | {"timestamp_ms": -1}).encode()).timestamp_ms is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": None}, "no key"),
        ({"key": "not base64!"}, "key that is not base64"),
        ({"value": 5}, "value that is not base64"),
        ({"value": {"a": 1}}, "value that is not base64"),
        ({"headers": None}, "headers"),
        ({"headers": {"a": "Yg=="}}, "headers"),
        ({"headers": [["a"]]}, "headers"),
        ({"headers": [[1, "Yg=="]]}, "headers"),
        ({"headers": [["a\0", "Yg=="]]}, "headers"),
        ({"headers": [["a", "%"]]}, "not base64"),
        ({"timestamp_ms": "now"}, "timestamp_ms"),
        ({"timestamp_ms": True}, "timestamp_ms"),
        ({"timestamp_ms": -7}, "timestamp_ms"),
    ],
    ids=str,
)
def test_a_line_that_is_not_of_an_export_is_refused(wrong, words):
    """With what is wrong about it (P1)."""
    with pytest.raises(BadLineError, match=words):
        lines.record(json.dumps(GOOD | wrong).encode())


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[]", b"5", b'{"key": null}', b"null"], ids=repr)
def test_other_json_is_no_line_of_an_export(line):
    """Nor is what is no JSON at all (P1)."""
    with pytest.raises(BadLineError):
        lines.record(line)


def test_a_value_is_published_as_it_stands():
    """Its bytes are not written anew; the key is a field of it (P1)."""
    line = '{ "id":7, "name" : "Zoë" }'.encode()

    assert lines.value(line, key_field="id") == Line(b"7", line, None, None)
    assert lines.value(line, key_field="name").key == "Zoë".encode()
    assert lines.value(b"[1]", key_field=None) == Line(None, b"[1]", None, None)


@pytest.mark.parametrize(
    "line",
    [b"[]", b'{"other": 1}', b'{"id": null}', b'{"id": ""}', b'{"id": 1.5}', b'{"id": true}', b"{"],
    ids=repr,
)
def test_a_value_without_its_key_is_refused(line):
    """A fraction, a truth value or nothing is no key (P1)."""
    with pytest.raises(BadLineError):
        lines.value(line, key_field="id")
