"""How app:name becomes a pipeline."""

from __future__ import annotations

import os
import sys

import pytest

from sideline import Pipeline
from sideline.errors import ConfigurationError, NotFoundError
from sideline.loading import load, module_of

SOURCE = """
from sideline import Pipeline

users = Pipeline("login", topics="users")
orders = Pipeline("orders", topics="orders")


@users.handler
def login(event):
    return None
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch, tmp_path):
    """Loading makes modules visible: not beyond this test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", "")
    # Nor that of another.
    monkeypatch.delitem(sys.modules, "app", raising=False)
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_a_pipeline_s_place(tmp_path):
    """path/to/file.py:name."""
    (tmp_path / "app.py").write_text(SOURCE)

    found = load("app.py:users")

    assert isinstance(found, Pipeline)
    assert found.name == "login"
    assert module_of(found).__file__ == str(tmp_path / "app.py")


def test_a_module_in_the_working_directory(tmp_path):
    """package.module:name."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "pipelines.py").write_text(SOURCE)

    assert load("team.pipelines:orders").name == "orders"


def test_a_file_named_like_a_known_module_does_not_replace_it(tmp_path):
    """A user's json.py is theirs, and json stays json."""
    import json

    (tmp_path / "json.py").write_text(SOURCE)

    assert load("json.py:users").name == "login"
    assert sys.modules["json"] is json


def test_a_file_whose_name_is_no_identifier(tmp_path):
    """my-app.py is a file like any other."""
    (tmp_path / "my-app.py").write_text(SOURCE)

    assert load("./my-app.py:users").name == "login"


def test_modules_beside_the_file_can_be_imported_by_workers_too(tmp_path):
    """What the file imports is found here and, by PYTHONPATH, in the processes started later."""
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "beside.py").write_text("topics = 'users'\n")
    (folder / "app.py").write_text(
        "import beside\nfrom sideline import Pipeline\nu = Pipeline('u', topics=beside.topics)\n"
    )

    load("deep/app.py:u")

    assert str(folder) in os.environ["PYTHONPATH"].split(os.pathsep)


def test_a_wrong_name_lists_the_right_ones(tmp_path):
    """The next step is in the error."""
    (tmp_path / "app.py").write_text(SOURCE)

    with pytest.raises(NotFoundError, match="'user' does not exist there") as caught:
        load("app.py:user")

    assert caught.value.hint == "It has: orders, users."


def test_a_file_without_pipelines_says_so(tmp_path):
    """An empty file is not a mistake in the name."""
    (tmp_path / "app.py").write_text("users = 1\n")

    with pytest.raises(NotFoundError, match="'users' is not a pipeline") as caught:
        load("app.py:users")

    assert caught.value.hint == "It declares no pipeline."


def test_a_module_missing_inside_the_user_s_module_is_the_user_s_error(tmp_path):
    """Not "there is no module app": app is there, what it imports is not."""
    (tmp_path / "app.py").write_text("import no_such_thing\n")

    with pytest.raises(ConfigurationError, match="No module named 'no_such_thing'") as caught:
        load("app:users")

    assert "line 1" in caught.value.hint


def test_a_syntax_error_is_shown_where_it_is(tmp_path):
    """The line and the caret, and nothing of ours."""
    (tmp_path / "app.py").write_text("def handler(:\n    pass\n")

    with pytest.raises(ConfigurationError, match="cannot be imported: SyntaxError") as caught:
        load("app.py:users")

    assert "def handler(:" in caught.value.hint
    assert "loading.py" not in caught.value.hint


def test_an_exit_in_the_user_s_module_does_not_end_the_command(tmp_path):
    """sys.exit() at import is an error like any other."""
    (tmp_path / "app.py").write_text("import sys\nsys.exit(3)\n")

    with pytest.raises(ConfigurationError, match="SystemExit: 3"):
        load("app.py:users")


def test_a_declaration_that_is_wrong_says_what_is_wrong(tmp_path):
    """sideline's own errors pass as they are."""
    (tmp_path / "app.py").write_text(
        "from sideline import Pipeline\nusers = Pipeline('login', topics=[])\n"
    )

    with pytest.raises(ConfigurationError, match="no topic is named"):
        load("app.py:users")


def test_a_file_that_failed_is_not_remembered(tmp_path):
    """Mended, it loads."""
    (tmp_path / "app.py").write_text("raise ValueError\n")
    with pytest.raises(ConfigurationError):
        load("app.py:users")
    (tmp_path / "app.py").write_text(SOURCE)

    assert load("app.py:users").name == "login"
