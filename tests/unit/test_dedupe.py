"""Message ids: what stands for them, and what a declaration may say (C4)."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Event, MessageId, Pipeline, Publish
from sideline.dedupe import digest, ids_of
from sideline.errors import ConfigurationError
from sideline.testing import event, run_slice

TEXT = b"01890a5d-ac96-774b-bcce-b302099a8057"


def header(value, name="message-id"):
    return event("v", headers=[(name, value)])


def test_a_uuid_is_kept_as_it_is():
    """So that those of version 7 stay in the order of time (C4)."""
    assert digest(TEXT) == uuid.UUID(TEXT.decode()).bytes
    assert ids_of(MessageId(), [header(TEXT)]) == ([uuid.UUID(TEXT.decode()).bytes], {})


@given(st.lists(st.one_of(st.binary(max_size=80), st.uuids().map(lambda one: str(one).encode()))))
def test_many_ids_are_the_same_as_each_alone(said):
    """Whatever else is in the slice, an id is sixteen bytes that it alone decides (C4)."""
    found, errors = ids_of(MessageId(), [header(one) for one in said])
    assert found == [digest(one) for one in said]
    assert all(one is not None and len(one) == 16 for one in found)
    assert not errors


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_different_ids_stay_different(first, second):
    """Of any bytes, upper case and dashes in odd places included (C4)."""
    assert (digest(first) == digest(second)) == (first == second)


@pytest.mark.parametrize(
    "odd",
    [
        TEXT.upper(),
        TEXT.replace(b"-", b" "),
        b" " + TEXT[1:],
        b"0" * 8 + b"-0000-0000-0000-" + b"0" * 11 + b" ",
        b"g" + TEXT[1:],
        TEXT + b"0",
        b"\xff" * 36,
        b"-" * 36,
        "ü".encode() * 18,
    ],
)
def test_what_only_looks_like_a_uuid_is_digested(odd):
    """Alone, and among others of the same length (C4)."""
    found, _ = ids_of(MessageId(), [header(odd), header(TEXT)])
    assert found == [digest(odd), digest(TEXT)]
    assert digest(odd) != digest(TEXT)


def test_an_event_without_an_id_is_not_checked():
    """No header, or one without a value (C4)."""
    assert (
        ids_of(MessageId(), [event("v"), header(None), header(b"", name="other")])[0] == [None] * 3
    )


def test_a_function_may_say_anything():
    """What it raises, or what is no id, is told by the event's place (C4)."""

    def of(one: Event):
        return {"n": 7, "t": "7", "b": b"7", "none": None, "pair": ("7", 1)}[one.text()]

    events = [event(value) for value in ("n", "t", "b", "none", "pair", "missing")]
    found, errors = ids_of(MessageId(of=of), events)
    assert found[0] == found[1] == found[2]
    assert found[3] is None
    assert found[4] not in {None, found[0]}
    assert [type(error) for error in errors.values()] == [KeyError]
    assert list(errors) == [5]
    _, errors = ids_of(MessageId(of=lambda _: object()), events[:1])
    assert "dedupe= returned a object" in str(errors[0])


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ("message-id", "it is MessageId(...) or a function"),
        (MessageId, "it is MessageId(...) or a function"),
        (MessageId(header=""), "the name of a header"),
        (MessageId(header=7), "the name of a header"),
        (MessageId(keep="soon"), "not a span of time"),
        (MessageId(keep="10s"), "between a minute and ten years"),
        (MessageId(keep="9999d"), "between a minute and ten years"),
        (MessageId(keep=None), "not a span of time"),
        (MessageId(keep=True), "not a span of time"),
        (MessageId(of="key"), "an ordinary function"),
    ],
)
def test_what_is_no_declaration_is_refused(given_, says):
    """In one sentence, before anything runs (C4)."""
    with pytest.raises(ConfigurationError, match="pipeline 'p'") as refused:
        Pipeline("p", topics="t", dedupe=given_)
    assert says in refused.value.message


def test_coroutines_are_no_ids():
    """A coroutine would be the id of every event (C4)."""

    async def of(_event):
        return "id"

    with pytest.raises(ConfigurationError, match="ordinary function"):
        Pipeline("p", topics="t", dedupe=of)


def test_ways_to_say_it():
    """A function alone is kept for a week; spans may be anything that spans are elsewhere (C4)."""
    assert Pipeline("p", topics="t").dedupe is None
    assert Pipeline("p", topics="t", dedupe=lambda one: one.key).dedupe.keep_seconds == 7 * 86_400
    assert MessageId(keep=timedelta(hours=2)).keep_seconds == 7200
    assert MessageId(keep="12h").keep_seconds == 43_200


@pytest.mark.parametrize("error", [KeyError("id"), SystemExit(3), GeneratorExit(), BaseException()])
def test_whatever_the_function_raises_is_its_events_alone(error):
    """Only Ctrl-C is somebody else's (F3)."""

    def name(one):
        if one.text() == "b":
            raise error
        return one.text()

    ids, errors = ids_of(MessageId(of=name), [event("a"), event("b"), event("c")])
    assert errors == {1: error}
    assert [one is None for one in ids] == [False, True, False]
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ids_of(MessageId(of=name), [event("b")])


def test_slices_in_tests_know_duplicates():
    """`run_slice` shows them, and what the function raised (C4)."""
    pipeline = Pipeline("p", topics="t", dedupe=lambda one: {"a": "1", "b": "1"}[one.text()])

    @pipeline.handler
    def publish(one: Event):
        return Publish("out", one.value)

    result = run_slice(pipeline, [event("a"), event("b"), event("c")])
    assert result.duplicates == {1}
    assert [len(some) for some in result.effects] == [1, 0, 0]
    assert result.failures[2].stage == "dedupe"
