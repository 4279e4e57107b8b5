"""The guardrail at work: what depends on order is neither dead-lettered nor written."""

from __future__ import annotations

import json

import pytest

from sideline.cli import main
from tests.support.operations import balanced, counts, states

# Handlers whose effects depend on order, or are nobody's to see.
BOUND = (
    {"handler": "record"},
    {"handler": "record", "concurrency": 3},
    pytest.param({"handler": "insert"}, marks=pytest.mark.long),
    {"handler": "call", "calls": True},
)


def release_dead(ground, capsys):
    """`sideline release --dead --all --execute`, as a person would; the operation's number."""
    arguments = ["release", "ground", "--dead", "--all", "--execute", "--json"]
    assert main.run([*arguments, "--database", ground.database]) == 0
    return json.loads(capsys.readouterr().out)["operations"][0]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_first_offending_effect_stops_the_pipeline(grounds, concurrency):
    """Its event is parked, nothing of it or behind it is written, the report refuses (F9)."""
    ground = grounds(handler="record", dead_letter=1, concurrency=concurrency)
    # Without a key it is an insert only; with one, an upsert without a version.
    ground.publish([(None, "a"), (None, "b"), ("zoe", "Zoey"), ("bob", "Bob"), (None, "c")])
    (report,) = ground.run()
    assert report.failure is not None
    assert (report.failure["stage"], report.failure["error"]) == ("guardrail", "GuardrailError")
    assert "updates table users" in report.failure["message"]
    assert "independent=True" in report.failure["hint"]
    assert ground.query("select count(*) from users") == [(0,)]
    parked = [place.offset for place in ground.parked()]
    assert parked[0] == 2
    assert {place.offset for place in ground.effects()} >= {0, 1}
    assert not {place.offset for place in ground.effects()} & {2, 3}
    assert ground.query("select count(*) from sideline.outbox") == [(0,)]
    ground.check_prefix()


def test_independent_records_may_be_overtaken(grounds):
    """Whoever says so is believed (F9)."""
    ground = grounds(handler="record", dead_letter=1, independent=True)
    ground.publish([("zoe", "Zoey"), ("zoe", "Zoiee")])
    (report,) = ground.run()
    assert report.failure is None
    ground.check()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_offending_effect_of_a_copy_stops_the_pipeline(chains, concurrency):
    """Its event waits on: the row stays `retrying`, its copy unread, nothing is written (F9)."""
    chain = chains(
        delays=["50ms"], handler="flaky_upsert", independent=False, concurrency=concurrency
    )
    ground = chain.ground
    ground.publish([(None, "heals:1 first"), ("zoe", "heals:1 Zoë"), (None, "heals:1 last")])
    chain.run()
    # Side by side, they may leave in more than one transaction.
    first, second, _ = (record.offset() for record in chain.committed(chain.retries[0]))
    for _ in range(2):
        chain.until_all_due()
        (report,) = chain.run()
        assert report.failure is not None
        assert report.failure["stage"] == "guardrail-retry"
        assert report.failure["event"] == f"{ground.topic}/0/1"
        assert "updates table users" in report.failure["message"]
        assert chain.states() == [(0, "resolved", 1), (1, "retrying", 1), (2, "retrying", 1)]
        assert [place.offset for place in ground.effects()] == [0]
        assert ground.query("select count(*) from users") == [(0,)]
        ((reached,),) = ground.query(
            "select next_offset from sideline.progress where topic = %s", chain.retries[0]
        )
        assert first < reached <= second
        chain.check_books()
    # Whoever says that they stand alone has lost nothing.
    ground.options["independent"] = True
    chain.settle()
    chain.check(dead=set())
    assert ground.query("select id, value from users") == [("zoe", "heals:1 Zoë")]


@pytest.mark.parametrize("now", BOUND, ids=lambda now: "-".join(map(str, now.values())))
def test_dead_events_are_not_released_over_newer_ones(chains, tmp_path, capsys, now):
    """The policy that let them be overtaken is gone; what they may overwrite is not (F9, C1)."""
    chain = chains(dead_letter=1, handler="failing", argument=None)
    ground = chain.ground
    ground.publish([("zoe", "bad"), ("zoe", "Zoiee")])
    chain.run()
    chain.check(dead={0})
    ground.options |= {"dead_letter": None, "independent": False, **now}
    ground.options["argument"] = str(tmp_path / "calls") if "calls" in now else None
    operation = release_dead(ground, capsys)
    (report,) = ground.run()
    assert report.failure is None, "live events go on"
    ((note,),) = ground.query("select note from sideline.operations")
    assert note.startswith(f"event {ground.topic}/0/0 stays dead: pipeline 'ground' "), note
    assert "overwrite a newer one" in note
    assert note.endswith("eclare independent=True."), note
    assert counts(ground.database, operation)[:3] == ("stopped", 0, 0)
    assert chain.states() == [(0, "dead", 1)]
    assert ground.query("select id, value from users") == [("zoe", "Zoiee")]
    assert not (tmp_path / "calls").exists() or not (tmp_path / "calls").read_text()
    chain.check(dead={0})


def test_what_comes_before_the_offending_event_is_released(chains, capsys):
    """Only what depends on order stays dead; the rest of a release is not undone (F9)."""
    chain = chains(dead_letter=1, handler="failing_all", argument=None)
    ground = chain.ground
    ground.publish([(None, "first"), ("zoe", "Zoë"), (None, "last")])
    chain.run()
    ground.options |= {"dead_letter": None, "independent": False, "handler": "record"}
    operation = release_dead(ground, capsys)
    ground.run()
    assert counts(ground.database, operation)[:3] == ("stopped", 1, 0)
    assert chain.states() == [(0, "resolved", 2), (1, "dead", 1), (2, "dead", 1)]
    # Whoever says that they stand alone goes on with the same release.
    ground.options["independent"] = True
    assert main.run(["ops", "resume", str(operation), "--database", ground.database]) == 0
    ground.run()
    assert counts(ground.database, operation)[:3] == ("done", 3, 0)
    assert ground.query("select id, value from users") == [("zoe", "Zoë")]
    balanced(ground.database)


@pytest.mark.parametrize(
    "point", ["replay-before-commit", pytest.param("replay-handled", marks=pytest.mark.long)]
)
def test_killed_while_dead_events_meet_the_guardrail(chains, capsys, point):
    """What may come back comes back once, what may not stays dead, whoever dies (F9, K1)."""
    chain = chains(dead_letter=1, handler="failing_all", argument=None)
    ground = chain.ground
    ground.publish([(None, "first"), ("zoe", "Zoë")])
    chain.run()
    ground.options |= {"dead_letter": None, "independent": False, "handler": "record"}
    operation = release_dead(ground, capsys)
    ground.killed(ground.start(ground.lease(), crash_at=point))
    ground.run()
    assert counts(ground.database, operation)[:3] == ("stopped", 1, 0)
    assert [state for _, state, _ in chain.states()] == ["resolved", "dead"]
    assert [place.offset for place in ground.effects()] == [0]
    balanced(ground.database)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_dead_events_of_a_key_come_back_in_order(chains, capsys, concurrency):
    """One that fails again is not overtaken, in this release or in the next one (C1, R3)."""
    chain = chains(dead_letter=1, handler="failing_all", argument=None)
    ground = chain.ground
    ground.publish([("a", "1 bad"), ("a", "2"), ("b", "3"), ("a", "4")])
    chain.run()
    now = {"independent": False, "slice_size": 1, "concurrency": concurrency}
    ground.options |= {"dead_letter": None, "handler": "picky_log", **now}
    operation = release_dead(ground, capsys)
    ground.run()
    assert states(ground.database, operation) == ["failed", "failed", "done", "failed"]
    # It was tried; what waits behind it was not.
    assert counts(ground.database, operation)[:3] == ("done", 1, 1)
    assert [state for _, state, _ in chain.states()] == ["dead", "dead", "resolved", "dead"]
    ground.options |= {"handler": "flaky", "argument": str(chain.folder)}
    operation = release_dead(ground, capsys)
    ground.run()
    assert states(ground.database, operation) == ["done"] * 3
    assert [place.offset for place in ground.effects()] == [2, 0, 1, 3]
    balanced(ground.database)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param({"handler": "flaky_upsert"}, marks=pytest.mark.long),
        {"handler": "flaky_upsert", "concurrency": 3},
        pytest.param({"handler": "flaky_tx"}, marks=pytest.mark.long),
        {"handler": "flaky_call", "calls": True},
    ],
    ids=lambda now: "-".join(map(str, now.values())),
)
def test_copies_of_an_older_policy_meet_the_guardrail(chains, now):
    """From retry topics to parking: copies under way are not written over newer rows (F9)."""
    chain = chains(delays=["50ms"], handler="flaky_upsert")
    ground = chain.ground
    ground.publish([("zoe", "heals:1 Zoë"), ("zoe", "fine Zoiee")])
    chain.run()
    ground.options |= {"delays": None, "independent": False, **now}
    chain.until_all_due()
    (report,) = chain.run()
    assert report.failure is not None
    assert report.failure["stage"] == "guardrail-retry"
    assert report.failure["event"] == f"{ground.topic}/0/0"
    assert "events out of their order could" in report.failure["message"]
    assert chain.states() == [(0, "retrying", 1)]
    assert ground.query("select id, value from users") == [("zoe", "fine Zoiee")]
    chain.check_books()
    ground.options |= {"handler": "flaky_upsert", "independent": True, "calls": False}
    chain.settle()
    assert chain.states() == [(0, "resolved", 1)]
    chain.check_books()
