"""How people name an event, a time and a page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline.errors import UsageError
from sideline.views import EventId, Position, parse_moment

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@given(
    st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True).filter(str.isascii),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
)
def test_an_id_is_read_as_it_is_written(topic, partition, offset):
    """Whatever Kafka allows, to the last bit."""
    wanted = EventId(topic, partition, offset)
    assert EventId.parse(str(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "users", "users/0", "users/0/1/2", "/0/1", "users/-1/1", "users/0/-1", "users/0/1 "),
        *(
            "users/0/\u0661",
            "us ers/0/1",
            "users/2147483648/0",
            f"users/0/{2**63}",
            "a" * 250 + "/0/1",
        ),
        "users/0/1\n",
    ],
)
def test_what_is_no_id_is_a_mistake_of_the_call(text):
    """Exit 2, with the way to write it."""
    with pytest.raises(UsageError, match="is not an event's id") as caught:
        EventId.parse(text)
    assert "users/2/1" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("1.5d", NOW - timedelta(hours=36)),
        ("2026-01-31T13:00:00+02:00", NOW - timedelta(hours=1)),
        ("2026-01-31T12:00:00.000001Z", NOW + timedelta(microseconds=1)),
    ],
)
def test_times_and_ages(text, expected):
    """A time with its zone, or how long ago."""
    assert parse_moment(text, now=NOW, what="--since") == expected


@pytest.mark.parametrize("text", ["", "2026-01-31", "2026-01-31T12:00", "2 weeks", "-1h", "9e9d"])
def test_a_time_without_its_zone_is_refused(text):
    """Nobody knows whose noon it would be."""
    with pytest.raises(UsageError, match="--since is"):
        parse_moment(text, now=NOW, what="--since")


def test_an_age_before_all_time_is_refused():
    """An overflow is the caller's mistake, not a bug."""
    with pytest.raises(UsageError):
        parse_moment("999999999d", now=NOW, what="--since")


@given(
    st.text(max_size=20),
    st.datetimes(timezones=st.just(UTC)),
    st.integers(0, 2**63 - 1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
)
def test_a_token_brings_back_the_position_exactly(pipeline, at, number, text):
    """To the microsecond and to the last bit; of its own list only."""
    position = Position(pipeline, at, number, text)
    token = position.token("keys")
    assert Position.parse(token, "keys") == position
    with pytest.raises(UsageError):
        Position.parse(token, "list")


@pytest.mark.parametrize("position", [Position("p", NOW, -1), Position("p", NOW, 0, "\0")])
def test_a_forged_token_reaches_no_database(position):
    """What PostgreSQL could not take is refused before."""
    with pytest.raises(UsageError):
        Position.parse(position.token("list"), "list")


@given(st.text(max_size=60))
def test_any_other_token_is_a_mistake_of_the_call(text):
    """Never an unexpected error."""
    with pytest.raises(UsageError, match="is not where a page of this list ended"):
        Position.parse(text, "list")
