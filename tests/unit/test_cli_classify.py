"""`sideline classify`: what would happen to an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sideline.cli import main

APP = """
from datetime import timedelta

from sideline import Backoff, Pipeline, Skip
from sideline.policies import Block


http = None


class Busy(Exception):
    def __init__(self):
        raise AssertionError("nobody makes one")


class Outer:
    class Inner(Busy):
        pass


waiting = Pipeline(
    "waiting",
    topics="t",
    recoverable=[Busy, lambda error: True],
    retry=Backoff(first=timedelta(seconds=2), limit="1h", alert_after=90),
)
skipping = Pipeline("skipping", topics="t", on_failure=Skip())
blocking = Pipeline("blocking", topics="t", on_failure=Block())
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command beside a user's app.py; exit code, stdout and stderr come back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", "")
    (tmp_path / "app.py").write_text(APP)
    # That of another test may still be there.
    monkeypatch.delitem(sys.modules, "app", raising=False)
    before = set(sys.modules)

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main.run(["classify", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    yield command
    for name in set(sys.modules) - before:
        if name == "app" or name.startswith("sideline_app_"):
            del sys.modules[name]


@pytest.fixture
def answer(command):
    """The answer as JSON."""

    def answer(*arguments: str) -> dict:
        code, out, err = command(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return answer


@pytest.mark.parametrize(
    ("arguments", "kind", "fate", "rule"),
    [
        (["ConnectionResetError"], "recoverable", "waits", "connection"),
        (["psycopg.errors.UniqueViolation"], "data", "parked", "sqlstate"),
        (["psycopg.OperationalError"], "recoverable", "waits", "connection"),
        (["psycopg.OperationalError", "--sqlstate", "57p01"], "recoverable", "waits", "sqlstate"),
        (["23505"], "data", "parked", "sqlstate"),
        (["57P01"], "recoverable", "waits", "sqlstate"),
        (["xx000"], "recoverable", "waits", "sqlstate"),
        (["99999"], "data", "parked", "sqlstate"),
        (["42P01"], "deployment", "stops", "sqlstate"),
        (["urllib.error.HTTPError", "--status", "503"], "recoverable", "waits", "status"),
        (["urllib.error.HTTPError", "--status", "404"], "data", "parked", "status"),
        (["urllib.error.HTTPError"], "data", "parked", "status"),
        (["Recoverable"], "recoverable", "waits", "by-hand"),
        (["sideline.NonRecoverable"], "data", "parked", "by-hand"),
        (["KeyError"], "data", "parked", "default"),
        (["SystemExit"], "data", "parked", "default"),
        (["app.Busy"], "data", "parked", "default"),
        (["app:Busy"], "data", "parked", "default"),
        (["app.py:Outer.Inner"], "data", "parked", "default"),
        (["app.Outer.Inner"], "data", "parked", "default"),
        (["app.Busy", "--pipeline", "app:waiting"], "recoverable", "waits", "pipeline"),
        (["app.py:Busy", "--pipeline", "app.py:waiting"], "recoverable", "waits", "pipeline"),
        (["Busy", "--pipeline", "app:waiting"], "recoverable", "waits", "pipeline"),
        (["Outer.Inner", "--pipeline", "app:waiting"], "recoverable", "waits", "pipeline"),
        (
            ["http.client.IncompleteRead", "--pipeline", "app:waiting"],
            "recoverable",
            "waits",
            "connection",
        ),
        (["KeyError", "--pipeline", "app:skipping"], "data", "skipped", "default"),
        (["KeyError", "--pipeline", "app:blocking"], "data", "waits", "default"),
        (["42703", "--pipeline", "app:skipping"], "deployment", "stops", "sqlstate"),
    ],
    ids=" ".join,
)
def test_what_would_happen(answer, arguments, kind, fate, rule):
    """Kind, fate and rule, by the white list and the pipeline's own rules and policy (F1)."""
    found = answer(*arguments)
    assert (found["kind"], found["fate"], found["rule"]) == (kind, fate, rule)
    assert found["why"]
    assert found["happens"]
    assert found["change"]


def test_a_code_is_answered_with_its_class(answer):
    """Somebody has a SQLSTATE from a log, and wants the name for recoverable= (F1)."""
    found = answer("23505")
    assert found["exception"] == "psycopg.errors.UniqueViolation"
    assert found["why"] == "SQLSTATE 23505 (constraint violation)"
    assert "recoverable=[psycopg.errors.UniqueViolation]" in found["change"]


def test_in_words(command):
    """One sentence with the rule, then what happens and how to change it (F1)."""
    code, out, _ = command("psycopg.errors.UniqueViolation")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == (
        "psycopg.errors.UniqueViolation is the event's own failure: "
        "SQLSTATE 23505 (constraint violation)."
    )
    assert "parked at once" in lines[1]
    assert "recoverable=" in lines[2]


def test_the_pipeline_s_own_pauses_are_told(answer):
    """The backoff that would be used, with its units (F2)."""
    happens = answer("app.Busy", "--pipeline", "app:waiting")["happens"]
    assert "after 2s, then longer, at most 1h apart" in happens
    assert "an alert is raised after 90s" in happens


def test_what_was_not_asked_is_said(answer):
    """A function in recoverable= needs an exception; a status needs an HTTP client (F1)."""
    found = answer("KeyError", "--pipeline", "app:waiting", "--status", "503")
    assert found["kind"] == "data"
    assert any("Not asked: 1 function in recoverable=" in note for note in found["notes"])
    assert any("status 503 has no part" in note for note in found["notes"])
    assert answer("app.Busy", "--pipeline", "app:waiting")["notes"] == []


@pytest.mark.parametrize("code", ["42P01", "57014", "25P04", "40P01"])
def test_codes_with_two_sides_are_told_as_such(answer, code):
    """Where more than the code decides, the answer says so (K10, K16)."""
    assert answer(code)["notes"]


@pytest.fixture
def not_installed():
    """What the white list knows and this environment does not have."""
    import importlib.util

    if importlib.util.find_spec("botocore") is not None:
        pytest.skip("botocore is installed")
    return "botocore.exceptions"


def test_a_library_that_is_not_installed_is_known_by_name(answer, command, not_installed):
    """The white list needs no import; what it does not have cannot be judged (F1)."""
    assert answer(f"{not_installed}.ReadTimeoutError")["kind"] == "recoverable"
    assert answer(f"{not_installed}.ClientError", "--status", "503")["kind"] == "recoverable"
    code, out, err = command(f"{not_installed}.ParamValidationError")
    assert (code, out) == (4, "")
    assert "there is no 'botocore' here" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ConectionError"], "Did you mean ConnectionError?"),
        (["psycopg.errors.UniqueViolatoin"], "Did you mean UniqueViolation?"),
        (["json.dumps"], "'json.dumps' is there, but it is not an exception"),
        (["json.decoder"], "not an exception"),
        (["app:waiting"], "not an exception"),
        (["app:"], "there is no exception 'app:'"),
        (["nonsense.Error"], "there is no 'nonsense' here"),
        (["nonsense:Error"], "there is no module 'nonsense'"),
        (["nowhere.py:Error"], "there is no file 'nowhere.py'"),
        (["."], "there is no"),
        (["a..b"], "there is no"),
        ([""], "there is no exception"),
        (["KeyError", "--pipeline", "app:nobody"], "'nobody' does not exist there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unknown_names_get_one_sentence(command, arguments, words):
    """Exit code 4, and what to write instead (F1)."""
    code, out, err = command(*arguments)
    assert (code, out) == (4, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["KeyError", "--sqlstate", "banana"],
        ["KeyError", "--status", "9999"],
        ["KeyError", "--pipeline", "nothing"],
    ],
    ids=" ".join,
)
def test_wrong_calls_are_usage_errors(command, arguments):
    """Exit code 2."""
    assert command(*arguments)[0] == 2


def test_a_module_that_cannot_be_imported_is_said(command, tmp_path):
    """As with `sideline run`: the user's own traceback, exit code 2."""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    code, _, err = command("broken:Error")
    assert code == 2
    assert "ZeroDivisionError" in err


def test_only_what_is_named_is_imported():
    """Neither Spark nor a Kafka client is needed to answer (E1)."""
    code = (
        "import sys\n"
        "from sideline.cli import main\n"
        "main.run(['classify', 'ConnectionResetError'])\n"
        "heavy = [name for name in ('pyspark', 'psycopg', 'confluent_kafka', 'requests')"
        " if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
