"""What may be applied again, and how: decided from the declaration alone."""

from __future__ import annotations

import asyncio

import pytest

from sideline import (
    Block,
    Calls,
    Delete,
    Execute,
    Insert,
    Pipeline,
    Recoverable,
    Skip,
    Upsert,
)
from sideline.again import derive, repeats
from sideline.engine.handling import allowed_effects
from sideline.errors import KnownDamaged, StillWaiting

ROW = {"id": 1, "v": 2}
GUARDED = Upsert("t", ROW, key="id", version="v")


def made(handler=lambda event: None, **options) -> Pipeline:
    pipeline = Pipeline("login", topics="users", **options)
    pipeline.handler(handler)
    return pipeline


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, []),
        ({"effects": [Upsert, Delete]}, []),
        ({"effects": [Upsert, Insert, Execute]}, ["Execute", "Insert"]),
        ({"effects": [Insert("t", ROW)]}, ["Insert"]),
        ({"sink": Calls()}, ["calls of the handler"]),
    ],
)
def test_what_would_happen_again(options, found):
    """Upserts and deletes leave what they left before; everything else is said (R5)."""
    assert repeats(made(**options)) == found


def test_the_handlers_own_transaction_would_happen_again():
    """Nobody knows what it does (R5)."""
    assert repeats(made(lambda event, tx: None)) == ["SQL of the handler in its transaction"]


def test_a_run_is_the_same_pipeline_under_another_name():
    """The pipeline itself is not changed by it (C6)."""
    pipeline = made(slice_size=7)
    run = derive(pipeline, "login@3", include_damaged=True)
    assert (run.name, run.again.of, run.again.include_damaged) == ("login@3", "login", True)
    assert (run.slice_size, run.handle, run.version) == (7, pipeline.handle, pipeline.version)
    assert (pipeline.name, pipeline.again) == ("login", None)


@pytest.mark.parametrize(
    ("policy", "skip", "fate"),
    [
        (None, False, "stops"),
        (Block(), False, "stops"),
        (None, True, "skipped"),
        (Skip(), False, "skipped"),
    ],
)
def test_what_fails_is_never_parked(policy, skip, fate):
    """A key would have two tails: it stops the run, or is left out (C1)."""
    run = derive(made(on_failure=policy), "login@3", skip_failures=skip)
    assert run.fate(ValueError()) == fate
    assert run.fate(Recoverable()) == "waits"
    for left_out in (KnownDamaged(), StillWaiting()):
        assert run.fate(left_out) == "skipped"


@pytest.mark.parametrize(
    ("declared", "repeat", "allowed"),
    [
        (None, False, (Upsert, Delete)),
        (None, True, (Upsert, Insert, Delete, Execute)),
        ([Upsert, Insert], False, (Upsert,)),
        ([Upsert, Insert], True, (Upsert, Insert)),
    ],
)
def test_only_a_word_lets_effects_happen_again(declared, repeat, allowed):
    """--repeat-effects; otherwise the effect is refused when it is seen."""
    run = derive(made(effects=declared), "login@3", repeat_effects=repeat)
    assert set(allowed_effects(run)) & {Upsert, Insert, Delete, Execute} == set(allowed)


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("returned", "fits"),
    [
        (GUARDED, True),
        ([GUARDED, GUARDED], True),
        (None, True),
        (Upsert("t", ROW, key="id"), False),
        ([GUARDED, Delete("t", ROW)], False),
    ],
)
def test_beside_the_live_pipeline_only_guarded_upserts_pass(kind, returned, fits):
    """Whatever was declared: what the handler returns counts (F10)."""
    if kind == "async":

        async def handler(event):
            return returned
    else:

        def handler(event):
            return returned

    run = derive(made(handler, effects=[GUARDED]), "login@3", guarded=True)
    assert run.is_async == (kind == "async")

    def call():
        found = run.handle(None)
        return asyncio.run(found) if kind == "async" else found

    if fits:
        call()
    else:
        with pytest.raises(TypeError):
            call()
