"""Bytes and words from elsewhere on a terminal and in JSON: seen, never obeyed."""

from __future__ import annotations

import json
import sys
import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sideline import showing

EVIL = "\x1b[2J\x9b31m\u202egnp.exe\u2066\u200b\x07\x00\x7f\u2028\ud800"
ANY_TEXT = st.text(st.characters(exclude_categories=()))


def commands(text: str, *, kept: str = "") -> list[str]:
    """Characters that a terminal may obey instead of showing them."""
    return [
        character
        for character in text
        if character not in kept
        and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    ]


@given(ANY_TEXT)
@example(EVIL)
def test_no_text_commands_a_terminal(text):
    """Whatever a message holds, one line of printable characters is shown (F13)."""
    assert commands(showing.words(text)) == []
    assert commands(showing.short(text, 20)) == []
    assert commands(showing.paragraph(text), kept="\n") == []


@given(st.binary() | ANY_TEXT.map(lambda text: text.encode("utf-8", "replace")))
@example(b"\x1b]0;title\x07")
@example("\u202eabc".encode())
def test_no_bytes_command_a_terminal(value):
    """Keys, headers and values are seen, never obeyed (F13)."""
    assert commands(showing.data(value)) == []
    for line in showing.block(value) + showing.block(value, cut=True):
        assert commands(line) == []


def test_every_character_there_is_can_be_shown():
    """No code point slips through, and none of those that people write is disfigured."""
    for number in range(sys.maxunicode + 1):
        shown = showing.words(chr(number))
        if chr(number).isprintable():
            assert shown == chr(number)
        else:
            assert shown.isascii()
            assert shown.startswith("\\")


@given(st.none() | st.binary() | st.text().map(str.encode), st.none() | st.binary())
@example(b"-", None)
@example(b"", None)
@example(b"0x00", b"\x00")
@example(b"0xff", b"\xff")
@example(b'"a"', b"a")
@example(b"a\\n", b"a\n")
def test_different_keys_look_different(one, other):
    """What a person copies from the screen names one key only."""
    assert (showing.data(one) == showing.data(other)) == (one == other)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (b"-", '"-"'),
        (b"", '""'),
        (b"zoey", "zoey"),
        ("Zoë 1".encode(), "Zoë 1"),
        (b" zoey", '" zoey"'),
        (b"a\tb", r'"a\tb"'),
        (b'a"\x1bb', r'"a\"\x1bb"'),
        (b"0x12", '"0x12"'),
        (b"\xff\x00", "0xff00"),
    ],
)
def test_keys_are_shown_as_people_read_them(value, shown):
    """Plain text stays plain; everything else says what it is."""
    assert showing.data(value) == shown


def test_a_value_is_shown_by_its_lines_or_dumped():
    """JSON over several lines stays readable; what is no text is a dump."""
    assert showing.block(b'{\r\n\t"a": 1\n}') == ["{", '    "a": 1', "}"]
    assert showing.block(b"\x00\x01" + b"x" * 16) == [
        "00000000  00 01 78 78 78 78 78 78 78 78 78 78 78 78 78 78  ..xxxxxxxxxxxxxx",
        "00000010  78 78                                            xx",
    ]


def test_a_value_that_was_cut_inside_a_character_is_still_text():
    """The bound falls where it falls."""
    value = "Zoë🦓".encode()
    for end in range(len(value) - 3, len(value)):
        assert showing.block(value[:end], cut=True) == ["Zoë"]
    assert showing.block(value[:-1])[0].startswith("00000000  5a 6f")


@given(st.none() | st.binary() | st.text().map(str.encode))
def test_bytes_in_json_come_back_exactly(value):
    """One form for text and one for the rest, and nothing is lost in either (F13)."""
    found = showing.as_json(value)
    if found is None:
        assert value is None
    elif "text" in found:
        assert found["text"].encode() == value
    else:
        assert bytes.fromhex(found["hex"]) == value


@given(st.text())
@example("\x7f\x9b\u202e\U000e0001\x1b\n")
def test_json_means_the_same_and_commands_nobody(text):
    """Also a program's output may land on a terminal."""
    printed = showing.json_text(orjson.dumps({"text": text}).decode())
    assert commands(printed) == []
    assert json.loads(printed) == {"text": text}


def test_times_are_utc_and_can_be_given_back():
    """What a list prints, --since takes."""
    at = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=2)))
    assert showing.moment(at) == "2026-01-02T01:04:05Z"
    assert datetime.fromisoformat(showing.moment(at)) == at.replace(microsecond=0).astimezone(UTC)


def test_short_words_end_with_dots():
    """A bound that is not passed changes nothing."""
    assert showing.short("a" * 20, 20) == "a" * 20
    assert showing.short("a" * 21, 20) == "a" * 17 + "..."
