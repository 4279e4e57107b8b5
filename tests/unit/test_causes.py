"""Why an event failed, in words that can be stored, counted and read."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors
from psycopg.pq import DiagnosticField

from sideline import causes
from sideline.causes import (
    MESSAGE_CHARACTERS,
    TRACEBACK_CHARACTERS,
    Cause,
    cause_of,
    class_name,
    message_of,
    storable,
)
from sideline.slices import effects_of
from sideline.testing import event

APP = """
import json


class Busy(Exception):
    pass


def login(event):
    return name_of(json.loads(event))


def name_of(user):
    if user.get("busy"):
        raise Busy("later")
    return user["name"]


class Users:
    def rename(self, user):
        return name_of(user)[99]


def handler():
    def handle(user):
        raise Busy("nested")

    return handle
"""


@pytest.fixture
def app(tmp_path):
    """A user's module, imported from a file."""
    return _import(tmp_path / "app.py", APP)


def _import(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _raised(function, *arguments) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001
        # As if we had caught it where sideline does: without this file's frame.
        below = sys.exc_info()[2].tb_next
        return BaseException.with_traceback(error, below)
    raise AssertionError


def _refused(cls, message: str, **fields: str) -> psycopg.Error:
    """An error as PostgreSQL sends it."""
    numbers = {DiagnosticField[name.upper()]: text.encode() for name, text in fields.items()}
    return cls(message, info=dict.fromkeys(DiagnosticField) | numbers)


def _is_storable(text: str) -> bool:
    text.encode()
    return "\0" not in text


def test_the_place_is_the_innermost_line_of_the_user(app):
    """A library's frame is not where a person looks (F3)."""
    missing = cause_of(_raised(app.login, "{}"), "handler")
    assert (missing.error, missing.stage) == ("KeyError", "handler")
    assert missing.place == "app.py:16 in name_of"
    assert missing.message == "'name'"

    broken = cause_of(_raised(app.login, "{nonsense"), "handler")
    assert broken.place == "app.py:10 in login"
    assert broken.error == "json.decoder.JSONDecodeError"

    # sideline's own frames below it are no better.
    undecodable = cause_of(_raised(lambda: event(b"\xff").json()), "handler")
    assert undecodable.place.startswith("test_causes.py:")


def test_places_are_named_as_in_the_code(app):
    """Methods by their class, nested functions by their own name, packages by their folder."""
    assert cause_of(_raised(app.Users().rename, {"name": ""}), "handler").place == (
        "app.py:21 in Users.rename"
    )
    assert cause_of(_raised(app.handler(), {}), "handler").place == "app.py:26 in handle"


def test_a_package_is_named_with_its_file(tmp_path):
    """`__init__.py` alone says nothing."""
    package = _import(tmp_path / "shop" / "__init__.py", APP)
    assert cause_of(_raised(package.login, "{}"), "handler").place == (
        "shop/__init__.py:16 in name_of"
    )


def test_code_that_was_installed_is_the_users_where_we_called_it(tmp_path):
    """A deployed application lies among its libraries, and is told from them."""
    packages = tmp_path / "lib" / "site-packages"
    library = _import(packages / "library" / "parts.py", "def fail(_):\n    raise ValueError\n")
    shop = _import(
        packages / "shop" / "users.py", "def login(fail):\n    return [fail(1) for _ in '1']\n"
    )
    assert cause_of(_raised(shop.login, library.fail), "handler").place.startswith("users.py:2 in ")

    mine = _import(tmp_path / "mine.py", "def login(inner, fail):\n    return inner(fail)\n")
    assert cause_of(_raised(mine.login, shop.login, library.fail), "handler").place == (
        "mine.py:2 in login"
    )


def test_an_error_outside_the_users_code_is_placed_by_its_stage():
    """Our own lines would send a tired person to the wrong file."""
    misfit = cause_of(_raised(effects_of, 5, ()), "handler")
    assert (misfit.error, misfit.place) == ("TypeError", "handler")

    never_raised = cause_of(RuntimeError("made by hand"), "write")
    assert (never_raised.place, never_raised.traceback) == ("write", "RuntimeError: made by hand\n")


def test_equal_failures_have_one_fingerprint(app, tmp_path):
    """Lines may move, messages may differ: it is still the same cause."""
    one = cause_of(_raised(app.login, '{"busy": 1}'), "handler").fingerprint
    assert len(one) == 12
    assert int(one, 16) >= 0
    assert cause_of(_raised(app.name_of, {"busy": 2}), "handler").fingerprint == one

    edited = _import(tmp_path / "later" / "app.py", "# a line more\n" + APP)
    assert cause_of(_raised(edited.login, '{"busy": 1}'), "handler").fingerprint == one


def test_other_failures_have_other_fingerprints(app, tmp_path):
    """By class, by function, by file."""
    copy = _import(tmp_path / "copy.py", APP)
    found = {
        cause_of(error, "handler").fingerprint
        for error in (
            _raised(app.login, '{"busy": 1}'),
            _raised(app.login, "{}"),
            _raised(app.login, "{nonsense"),
            _raised(app.handler(), {}),
            _raised(copy.login, '{"busy": 1}'),
        )
    }
    assert len(found) == 5


def test_fingerprints_outlive_the_process(app):
    """A written-down value: counters in the ledger depend on it."""
    error = _raised(app.login, "{}")
    assert cause_of(error, "handler").fingerprint == "0ec7661f2c8f"


def test_a_module_without_a_lasting_name_does_not_name_the_class(app):
    """loading.py calls a file whose name is taken something else in every process."""
    assert class_name(app.Busy) == "app.Busy"
    app.Busy.__module__ = "sideline_app_123"
    causes._class_names.clear()
    assert class_name(app.Busy) == "Busy"
    assert class_name(KeyError) == "KeyError"
    assert class_name(errors.CheckViolation) == "psycopg.errors.CheckViolation"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (
            {"schema_name": "public", "table_name": "users", "constraint_name": "age_check"},
            "constraint age_check on users",
        ),
        ({"table_name": "users", "column_name": "name"}, "column name on users"),
        ({"constraint_name": "positive"}, "constraint positive"),
        ({"table_name": "users"}, "sqlstate 23514 on users"),
        (
            {"context": "PL/pgSQL function refuse(integer) line 3 at RAISE\nSQL statement"},
            "sqlstate 23514 in refuse(integer)",
        ),
        ({"context": "PL/pgSQL function inline_code_block line 3 at RAISE"}, "sqlstate 23514"),
        ({}, "sqlstate 23514"),
    ],
)
def test_postgresql_names_the_place(fields, place):
    """A violated constraint is the same cause whatever wrote the row."""
    cause = cause_of(_refused(errors.CheckViolation, "new row ...", **fields), "write")
    assert cause.place == place
    assert cause.error == "psycopg.errors.CheckViolation"


def test_constraints_are_told_apart():
    """By code, schema, table and name; the row's values do not matter."""
    base = {"schema_name": "public", "table_name": "users", "constraint_name": "age_check"}

    def fingerprint(cls=errors.CheckViolation, message="age 7", **fields):
        return cause_of(_refused(cls, message, **base | fields), "write").fingerprint

    assert fingerprint() == fingerprint(message="age 8")
    others = {
        fingerprint(),
        fingerprint(errors.UniqueViolation),
        fingerprint(schema_name="other"),
        fingerprint(table_name="people"),
        fingerprint(constraint_name="age_check2"),
    }
    assert len(others) == 5


def test_a_handlers_own_statement_is_placed_by_its_line(app):
    """PostgreSQL names nothing for a bad number; the handler's line does."""

    def overflow(_user):
        raise _refused(errors.NumericValueOutOfRange, "integer out of range")

    app.name_of = overflow
    assert cause_of(_raised(app.login, "{}"), "handler").place.endswith("in overflow")
    assert cause_of(overflow_raised(), "write").place == "sqlstate 22003"


def overflow_raised() -> BaseException:
    return _refused(errors.NumericValueOutOfRange, "integer out of range")


def test_an_error_that_travelled_is_told_alike():
    """Pickled from a worker to the driver, the diagnosis comes along."""
    error = _refused(errors.CheckViolation, "no", table_name="users", constraint_name="age_check")
    assert cause_of(pickle.loads(pickle.dumps(error)), "write") == cause_of(error, "write")


def test_the_traceback_begins_with_the_user(app):
    """How we got there is nobody's concern; what the user's code did is."""
    error = _raised(app.login, "{nonsense")
    # Frames of ours in front of it.
    text = cause_of(error, "handler").traceback
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('app.py", line 10, in login')
    assert "json" in text
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")

    def handle(_event):
        raise ValueError("mine")

    ours = _raised(effects_of, (handle(one) for one in (1,)), ())
    assert "slices.py" not in cause_of(ours, "handler").traceback


def test_chains_are_told_in_the_order_in_which_they_happened(app):
    """First what was the reason, with the words that Python uses."""

    def because():
        try:
            app.login("{}")
        except KeyError as error:
            raise ValueError("no name") from error

    def meanwhile():
        try:
            app.login("{}")
        except KeyError:
            app.login("{nonsense")

    def hidden():
        try:
            app.login("{}")
        except KeyError:
            raise ValueError("no name") from None

    text = cause_of(_raised(because), "handler").traceback
    assert text.index("KeyError: 'name'") < text.index("direct cause") < text.index("ValueError: ")
    text = cause_of(_raised(meanwhile), "handler").traceback
    assert text.index("KeyError") < text.index("During handling") < text.index("JSONDecodeError")
    assert "KeyError" not in cause_of(_raised(hidden), "handler").traceback


def test_chains_that_bite_their_tail_end():
    """Two errors may name each other as their cause."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    text = cause_of(one, "handler").traceback
    assert text.count("ValueError: one") == text.count("ValueError: two") == 1


def test_the_oldest_of_a_long_chain_are_left_out():
    """The newest says what became of the event."""
    error: BaseException = ValueError("number 0")
    for number in range(1, 100):
        following = ValueError(f"number {number}")
        following.__cause__, error = error, following
    text = cause_of(error, "handler").traceback
    assert text.startswith("(earlier ones are left out)\n")
    assert text.endswith("ValueError: number 99\n")


def test_a_group_is_told_by_its_first_member(app):
    """A TaskGroup's own words say nothing about what failed; the traceback has them all."""
    first, second = _raised(app.login, "{}"), ValueError("the other")
    group = ExceptionGroup("unhandled errors", [ExceptionGroup("inner", [first]), second])
    cause = cause_of(group, "handler")
    assert cause[:5] == cause_of(first, "handler")[:5]
    for words in ("unhandled errors", "inner", "KeyError: 'name'", "ValueError: the other"):
        assert words in cause.traceback


def test_notes_are_kept(app):
    """What a handler adds to an exception is meant to be read."""
    error = _raised(app.login, "{}")
    error.add_note("while reading order 7")
    assert cause_of(error, "handler").traceback.endswith(
        "KeyError: 'name'\nwhile reading order 7\n"
    )


def test_recursion_is_cut_in_its_middle():
    """Both ends are kept, the repeated frames are not, and the bound holds."""

    def ping(depth):
        return pong(depth)

    def pong(depth):
        return ping(depth + 1)

    cause = cause_of(_raised(ping, 0), "handler")
    assert cause.error == "RecursionError"
    assert "frames ..." in cause.traceback
    assert len(cause.traceback) <= TRACEBACK_CHARACTERS


def test_long_texts_are_bounded():
    """A message is cut at its end; of a traceback the head and the tail stay."""
    error = ValueError("x" * 100_000)
    error.__cause__ = KeyError("y" * 100_000)
    error.add_note("z" * 100_000)
    for number in range(10):
        error.add_note(f"{number}" * 100_000)
    cause = cause_of(error, "handler")
    assert len(cause.message) == MESSAGE_CHARACTERS
    assert cause.message.endswith("x...")
    assert len(cause.traceback) <= TRACEBACK_CHARACTERS
    assert cause.traceback.startswith("KeyError: 'yyy")
    assert "... cut ..." in cause.traceback


def test_passwords_are_masked(app):
    """Neither the message nor a line of source that is shown gives one away."""

    def connect():
        raise ValueError("cannot reach postgresql://zoe:geheim@db.example/app password=geheim")

    error = _raised(connect)
    error.add_note("sslpassword = 'ge heim'")
    cause = cause_of(error, "handler")
    assert "zoe:***@db.example" in cause.message
    assert "raise ValueError" in cause.traceback
    assert "heim" not in "".join(cause)


def test_a_password_at_the_edge_is_masked():
    """The cut comes after the masking."""
    for start in range(MESSAGE_CHARACTERS - 40, MESSAGE_CHARACTERS):
        text = "x" * start + " postgresql://zoe:geheim@db.example/app"
        assert ":gehe" not in message_of(ValueError(text))


class Evil(str):
    """A text that does not behave like one."""

    __slots__ = ()

    def _refuse(self, *_arguments):
        raise RuntimeError("no")

    __len__ = __hash__ = __eq__ = __contains__ = __getitem__ = _refuse
    startswith = encode = isascii = replace = rpartition = __format__ = __str__ = _refuse


class Unhashable(type):
    def __hash__(cls):
        raise RuntimeError("no")

    def __eq__(cls, _other):
        raise RuntimeError("no")

    def __getattribute__(cls, _name):
        raise RuntimeError("no")


def _hostile() -> dict[str, BaseException]:
    def refuse(*_arguments):
        raise RuntimeError("no")

    def endless(self):
        return str(self)

    def made(name, **body) -> BaseException:
        return type(name, (Exception,), body)("text")

    refusing = property(refuse)
    return {
        "str raises": made("A", __str__=refuse, __repr__=refuse),
        "str exits": made("B", __str__=lambda _self: sys.exit(3)),
        "str interrupts": made("C", __str__=lambda _self: (_ for _ in ()).throw(KeyboardInterrupt)),
        "str is no text": made("D", __str__=lambda _self: 5),
        "str is evil": made("E", __str__=lambda _self: Evil("abc")),
        "str recurses": made("F", __str__=endless),
        "NUL and surrogates": ValueError("a\0b\ud800c", b"\0"),
        "no bytes": made("G", __qualname__="G\0\ud800"),
        "every attribute raises": made("H", __getattribute__=refuse),
        "attributes raise": made(
            "I", **dict.fromkeys(("__traceback__", "__cause__", "__notes__", "args"), refusing)
        ),
        "class lies": made("J", __class__=refusing),
        "class is a text": made("K", __class__="ExceptionGroup"),
        "module is a number": made("L", __module__=5),
        "module is evil": made("M", __module__=Evil("app")),
        "name is evil": made("N", __qualname__=Evil("Name")),
        "metaclass": Unhashable("O", (Exception,), {})("text"),
        "evil code": made("P", sqlstate=Evil("23505"), diag=object()),
        "evil diagnosis": made("Q", sqlstate="23505", diag=type("D", (), {"table_name": refusing})),
        "evil names": made("R", sqlstate="23505", diag=type("D", (), {"table_name": Evil("t")})),
        "notes are evil": made("S", __notes__=[Evil("a"), 5, "b\0"]),
        "notes are no list": made("T", __notes__=5),
        "base": type("U", (BaseException,), {"__str__": refuse})(),
        "empty": Exception(),
    }


@pytest.mark.parametrize("what", _hostile())
@pytest.mark.parametrize("raised", [False, True])
def test_hostile_exceptions_are_told_like_others(what, raised):
    """Whatever an exception's own methods do, its event is parked and nothing is raised (F3)."""
    error = _hostile()[what]
    if raised:

        def handle():
            raise _hostile()[what]

        error = _raised(handle)
    cause = cause_of(error, "handler")
    assert type(cause) is Cause
    assert all(type(text) is str and _is_storable(text) for text in cause)
    assert cause.error
    assert cause == cause_of(error, "handler")


def test_a_hostile_exception_in_a_group_and_in_a_chain():
    """One bad member does not hide the others."""
    bad = _hostile()["str raises"]
    error = ValueError("good")
    error.__cause__ = ExceptionGroup("some", [bad, KeyError("name")])
    text = cause_of(error, "handler").traceback
    assert "cannot be shown" in text
    assert "KeyError: 'name'" in text
    assert text.endswith("ValueError: good\n")


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_any_text_becomes_storable(text):
    """PostgreSQL takes it, and what it took before is unchanged."""
    told = storable(text)
    assert _is_storable(told)
    if "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert told == text


def test_what_is_remembered_changes_nothing(app):
    """A failure told from memory reads as the first time, also after all was forgotten."""
    error = _raised(app.login, "{nonsense")
    first = cause_of(error, "handler")
    assert cause_of(_raised(app.login, "{nonsense"), "handler") == first
    for number in range(2_000):
        made = type(f"Error{number}", (Exception,), {})("text")
        assert cause_of(made, "handler").error.endswith(f"Error{number}")
    assert cause_of(error, "handler") == first
    for known in (causes._class_names, causes._prints, causes._stacks, causes._sources):
        assert len(known) <= 512


def test_equal_code_of_two_files_is_told_apart(tmp_path):
    """Python calls two functions equal that differ only in their file."""
    one = _import(tmp_path / "one.py", APP)
    two = _import(tmp_path / "two.py", APP)
    assert one.login.__code__ == two.login.__code__
    first, second = (cause_of(_raised(app.login, "{}"), "handler") for app in (one, two))
    assert (first.place, second.place) == ("one.py:16 in name_of", "two.py:16 in name_of")
    assert 'two.py"' in second.traceback


def test_the_traceback_reads_as_python_s_own(app):
    """Apart from our frames in front it is what a person would see on a terminal."""
    import traceback

    error = _raised(app.login, "{}")
    assert cause_of(error, "handler").traceback == "".join(traceback.format_exception(error))
    assert json.dumps(cause_of(error, "handler"))


def test_equal_failures_differ_in_their_words_alone():
    """What a thousand have in common is worked out once; each has its own message (F3)."""

    def work(number, kind):
        raise kind(f"user {number}")

    def fail(number, kind=ValueError):
        with pytest.raises(kind) as caught:
            work(number, kind)
        return caught.value

    first, second = (cause_of(fail(number), "handler") for number in (1, 2))
    assert (first.fingerprint, first.place, first.error) == (
        second.fingerprint,
        second.place,
        second.error,
    )
    assert (first.message, second.message) == ("user 1", "user 2")
    assert second.traceback == first.traceback.replace("user 1", "user 2")
    assert cause_of(fail(3, KeyError), "handler").fingerprint != first.fingerprint
    noted = fail(4)
    noted.add_note("look at the order")
    assert "look at the order" in cause_of(noted, "handler").traceback
    chained = fail(5)
    chained.__cause__ = fail(6)
    assert "user 6" in cause_of(chained, "handler").traceback
