"""Policies that let events overtake each other, and effects that must not be overtaken."""

from __future__ import annotations

import asyncio
import signal
from unittest.mock import Mock

import pytest

from sideline import (
    Block,
    Calls,
    DeadLetter,
    Delete,
    Event,
    Execute,
    Insert,
    Pipeline,
    Publish,
    RetryTopics,
    Sideline,
    Skip,
    Upsert,
)
from sideline.engine.driver import _failed
from sideline.engine.handling import handle
from sideline.engine.lease import failure_of
from sideline.errors import ConfigurationError, GuardrailError, RefusedError
from sideline.flood import Tally
from sideline.guardrail import check, first_forbidden, is_order_free, judge, unseen, watched
from sideline.ledger.copying import Copying
from sideline.policies import FloodGuard
from sideline.slices import Copy, Failure, Handled
from sideline.testing import FakeClock, run_slice

PLAIN = Upsert("users", {"id": 1}, key="id")
GUARDED = Upsert("users", {"id": 1, "at": 2}, key="id", version="at")
ROW = Insert("log", {"id": 1})
GONE = Delete("users", {"id": 1})
SQL = Execute("update users set name = %s", ("x",))
RECORD = Publish("out", b"v")
REORDERING = (DeadLetter(), RetryTopics())
FORBIDDEN = {
    "upsert": (PLAIN, "updates table users"),
    "delete": (GONE, "deletes from table users"),
    "execute": (SQL, "runs SQL of its own"),
}
FINE = {"insert": ROW, "publish": RECORD, "guarded upsert": GUARDED}


def pipeline_of(policy, **options):
    pipeline = Pipeline("login", topics="users", **options)
    # By hand, so that it does not matter which policies this version runs.
    pipeline.on_failure = policy
    pipeline.handler(lambda event: None)
    return pipeline


def event(number, key=b"k"):
    return Event("users", 0, number, 0, key, b"v")


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("what", FORBIDDEN)
def test_declared_effects_that_depend_on_order_are_refused_at_start(policy, what):
    """Upsert without version, Delete and Execute cannot be dead-lettered or retried (F9)."""
    effect, says = FORBIDDEN[what]
    with pytest.raises(GuardrailError, match=says) as refused:
        check(pipeline_of(policy, effects=[ROW, effect]))
    assert refused.value.exit_code == 5
    assert "independent=True" in refused.value.hint
    assert ("version=" in refused.value.hint) == (what == "upsert")
    check(pipeline_of(policy, effects=[ROW, effect], independent=True))


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("kind", [Delete, Execute])
def test_declared_kinds_that_depend_on_order_are_refused_at_start(policy, kind):
    """A kind of effect is enough where no version could help (F9)."""
    with pytest.raises(GuardrailError):
        check(pipeline_of(policy, effects=[Insert, kind]))


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
def test_what_is_fine_is_not_refused(policy):
    """Insert, Publish, upserts with a version guard, and what is not known yet (F9, F10)."""
    check(pipeline_of(policy, effects=list(FINE.values())))
    check(pipeline_of(policy, effects=[Insert, Publish, Upsert]))
    check(pipeline_of(policy))


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
def test_a_handler_with_the_transaction_is_refused_at_start(policy):
    """Nobody sees what it does (F9); the same holds for calls to the outside world."""
    pipeline = pipeline_of(policy)
    pipeline.handler(lambda event, tx: None)
    with pytest.raises(GuardrailError, match="the transaction"):
        check(pipeline)
    with pytest.raises(GuardrailError, match="outside world"):
        check(pipeline_of(policy, sink=Calls()))
    check(pipeline_of(policy, sink=Calls(), independent=True))


@pytest.mark.parametrize("policy", [Sideline(), Block(), Skip()])
@pytest.mark.parametrize("effect", [effect for effect, _ in FORBIDDEN.values()])
def test_policies_that_keep_the_order_take_everything(policy, effect):
    """Sideline, Block and Skip are not concerned."""
    pipeline = pipeline_of(policy, effects=[effect])
    check(pipeline)
    assert watched(pipeline, (Upsert,)) is pipeline.handle


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("shape", ["one", "several", "a generator"])
def test_the_first_offending_effect_parks_its_event_and_ends_the_slice(policy, what, shape):
    """What comes before is applied, the event is set aside, nothing behind it is tried (F9)."""
    effect, says = FORBIDDEN[what]
    seen = []

    def login(event):
        seen.append(event.offset)
        if event.offset != 2:
            return ROW
        if shape == "one":
            return effect
        return (one for one in (ROW, effect)) if shape == "a generator" else [ROW, effect]

    pipeline = pipeline_of(policy)
    pipeline.handler(login)
    events = [event(number, b"a%d" % number) for number in range(6)]
    # However many failed before it: it is not the flood guard's business.
    tally = Tally(FloodGuard(in_a_row=1), None)
    handled, failure = handle(pipeline, events, start=0, end=6, clock=FakeClock(), tally=tally)
    assert [one.offset for one in handled.events] == [0, 1, 2]
    assert handled.effects == [(ROW,), (ROW,), ()]
    assert set(handled.parked) == {2}
    assert isinstance(handled.parked[2].error, GuardrailError)
    assert (failure.stage, failure.event.offset) == ("guardrail", 2)
    assert says in failure.error.message
    assert max(seen) <= 3


def test_the_run_ends_with_exit_code_5():
    """The report of a worker becomes the error of the command (F9)."""
    pipeline = pipeline_of(DeadLetter())
    with pytest.raises(GuardrailError) as raised:
        judge(pipeline, [PLAIN])
    told = failure_of(raised.value, event="users/0/7", stage="guardrail")
    error = _failed(pipeline, told)
    assert (error.exit_code, error.code) == (5, "guardrail")
    assert error.message == (
        "pipeline 'login' updates table users, so dead letters could let an older event overwrite "
        "a newer one. Event users/0/7 is parked; nothing of it applied."
    )
    assert error.hint == (
        'Use on_failure=Sideline(), or give Upsert(..., version="updated_at"), '
        "or declare independent=True."
    )


def test_of_a_copy_the_command_says_that_it_waits_on():
    """An event in a retry topic is not parked: what is said of it is true (F9)."""
    pipeline = pipeline_of(RetryTopics())
    with pytest.raises(GuardrailError) as raised:
        judge(pipeline, [PLAIN])
    told = failure_of(raised.value, event="users/0/7", stage="guardrail-retry")
    error = _failed(pipeline, told)
    assert (error.exit_code, error.code) == (5, "guardrail")
    assert error.message == (
        "pipeline 'login' updates table users, so retry topics could let an older event overwrite "
        "a newer one. Event users/0/7 stays in its retry topic; nothing of it applied."
    )


@pytest.mark.parametrize("policy", REORDERING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("what", FINE)
def test_fine_effects_pass_the_handler(policy, what):
    """What is fine is handled as without the guardrail."""
    pipeline = pipeline_of(policy)
    pipeline.handler(lambda event: FINE[what])
    assert watched(pipeline, (Insert, Publish, Upsert))(event(0)) == (FINE[what],)
    if what != "publish":
        assert run_slice(pipeline, [event(0)]).effects == [(FINE[what],)]


def test_an_async_handler_is_watched_too():
    """Concurrent handlers meet the same guardrail (F9)."""

    async def login(event):
        return PLAIN

    pipeline = pipeline_of(RetryTopics())
    pipeline.handler(login)
    with pytest.raises(GuardrailError, match="retry topics could"):
        asyncio.run(watched(pipeline, (Upsert,))(event(0)))


def test_events_out_of_order_are_judged_whatever_the_policy():
    """What comes back years later meets the guardrail also where the policy keeps the order."""
    pipeline = pipeline_of(Sideline())
    effects = [(PLAIN,), (ROW,), (GUARDED, GONE), (PLAIN,)]
    place, error = first_forbidden(pipeline, effects, [1, 2, 3])
    assert place == 2
    assert "deletes from table users, so events out of their order could" in error.message
    assert error.hint == "Declare independent=True."
    _, error = first_forbidden(pipeline, effects, [3])
    assert error.hint == 'Give Upsert(..., version="updated_at"), or declare independent=True.'
    assert first_forbidden(pipeline, effects, [1]) is None
    pipeline.independent = True
    assert first_forbidden(pipeline, effects, range(4)) is None


def test_what_nobody_sees_is_refused_out_of_order():
    """Effects of a transaction's or an outside world's handler cannot be judged (F9)."""
    pipeline = pipeline_of(Sideline())
    assert unseen(pipeline) is None
    pipeline.handler(lambda event, tx: None)
    assert "the transaction" in unseen(pipeline).message
    assert "outside world" in unseen(pipeline_of(Sideline(), sink=Calls())).message
    assert unseen(pipeline_of(Sideline(), sink=Calls(), independent=True)) is None


def test_the_guardrails_error_is_parked_whatever_the_policy():
    """It is neither retried nor dead-lettered."""
    for policy in (*REORDERING, Sideline(), Block(), Skip()):
        assert pipeline_of(policy).fate(GuardrailError("no")) == "parked"


def test_a_copy_that_meets_the_guardrail_stops_whatever_the_policy():
    """Neither its row nor its copy is passed: there is nothing behind which it could be parked."""
    for policy in (*REORDERING, Sideline(), Block(), Skip()):
        assert pipeline_of(policy).fate_of_copy(GuardrailError("no"), attempt=1) == "stops"


def test_nothing_that_is_parked_is_settled():
    """A settlement has no word for it, and losing it silently is not one (F8)."""
    failed = Failure(event(0, b"zoe"), "handler", GuardrailError("no"))
    copies = [Copy(0, 1, 0, 0)]
    handled = Handled(0, 1, [event(0, b"zoe")], [()], parked={0: failed}, copies=copies)
    connection = Mock()
    with pytest.raises(RefusedError, match="users/0/0 came from a retry topic"):
        Copying(connection, "login", None, version="").settlement(handled)
    connection.rollback.assert_called_once_with()


@pytest.mark.parametrize(
    ("effects", "free"),
    [
        (None, False),
        ([Upsert], False),
        ([PLAIN], False),
        ([Upsert("t", {"id": 1, "v": 2}, key="id", version="v")], True),
        ([Upsert("t", {"id": 1, "v": 2}, key="id", version="v"), Delete], False),
        ([Insert, Publish, Insert("t", {"id": 1})], True),
        ([Delete("t", {"id": 1})], False),
        ([Execute], False),
    ],
)
def test_order_is_free_where_everything_declared_is(effects, free):
    """Kinds and examples of effects are declared side by side; rows are no keys of a set."""
    pipeline = Pipeline("login", topics="users", effects=effects)
    pipeline.handler(lambda event: None)
    assert is_order_free(pipeline) is free


def test_independent_is_said_in_so_many_words():
    """Anything but True or False is a mistake."""
    with pytest.raises(ConfigurationError, match="independent"):
        Pipeline("login", topics="users", independent="yes")


@pytest.fixture
def same_signals():
    """A command listens to signals for as long as its process lasts; this one goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_refuses_before_it_reaches_for_anything(tmp_path, capsys, same_signals):
    """`sideline run` of a pipeline that declares what it must not do exits with 5 (F9)."""
    from sideline.cli import main

    app = tmp_path / "app.py"
    app.write_text(
        "from sideline import DeadLetter, Pipeline, Upsert\n"
        "row = Upsert('users', {}, key='id')\n"
        "flow = Pipeline('login', topics='users', on_failure=DeadLetter(), effects=[row])\n"
        "flow.handler(lambda event: row)\n"
    )
    nowhere = ["--kafka", "127.0.0.1:1", "--database", "postgresql://x@127.0.0.1:1/x"]
    assert main.run(["run", f"{app}:flow", *nowhere]) == 5
    told = capsys.readouterr().err
    assert "updates table users" in told
    assert "independent=True" in told
