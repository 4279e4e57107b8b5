"""Why an event failed, in words that can be stored, counted and read (pure).

It runs for every event that fails, on exceptions that strangers wrote: nothing here may raise,
and what thousands of equal failures have in common is worked out once.
"""

from __future__ import annotations

import hashlib
import os
import re
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NamedTuple, TypeVar

from sideline.masking import mask_text

MESSAGE_CHARACTERS = 2_000
TRACEBACK_CHARACTERS = 8_000
_SHORT_CHARACTERS = 200
_BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
# More than is kept, so that a password at the edge is still seen as one.
_SEEN_CHARACTERS = 2 * MESSAGE_CHARACTERS
_CUT = "\n  ... cut ...\n"
_FIRST_FRAMES, _LAST_FRAMES = 15, 35
_LONGEST_CHAIN = 8
_LONGEST_TRACE = 100
_DEEPEST_GROUP = _MOST_MEMBERS = _MOST_NOTES = 8
# What is remembered is forgotten as a whole when it has grown to this.
_ROOM = 512

_OURS = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - no file is touched
_PYTHON = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_PACKAGES = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
# We call these ourselves, so a frame of theirs right behind ours is not the user's.
_OUR_LIBRARIES = frozenset({"confluent_kafka", "orjson", "psycopg", "psycopg_binary", "pyspark"})
_FUNCTION = re.compile(r"PL/pgSQL function (?!inline_code_block)(.+?) line [0-9]+ at ")
_SQLSTATE = re.compile(r"[0-9A-Z]{5}", re.ASCII)
# The last is what loading.py calls a file whose name is taken, with a number that changes.
_NAMELESS_MODULES = re.compile(r"builtins$|__main__$|sideline_app_")

# By the descriptors of the base class: a subclass may have put anything in their place.
_traceback_of: Callable[[BaseException], TracebackType | None]
_traceback_of = BaseException.__dict__["__traceback__"].__get__
_forget_traceback: Callable[[BaseException, None], None]
_forget_traceback = BaseException.__dict__["__traceback__"].__set__
_cause_of: Callable[[BaseException], BaseException | None]
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of: Callable[[BaseException], BaseException | None]
_context_of = BaseException.__dict__["__context__"].__get__
_hides_context: Callable[[BaseException], bool]
_hides_context = BaseException.__dict__["__suppress_context__"].__get__
_members_of: Callable[[BaseException], tuple[BaseException, ...]]
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_qualname_of: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__

A = TypeVar("A")
T = TypeVar("T")
Where = tuple[tuple[str, ...], str]
"""What two failures at the same place have in common, and the place in words."""


class Cause(NamedTuple):
    """What a list of causes shows; events that fail alike have the same fingerprint."""

    fingerprint: str
    """12 hex digits: error class and the user's function, or SQLSTATE and constraint."""
    error: str
    """The class, as `sideline classify` takes it."""
    stage: str
    place: str
    """What a tired person looks for: ``app.py:17 in login``, ``constraint age_check on users``."""
    message: str
    traceback: str


class Alike(NamedTuple):
    """What failures of one class at one place have in common."""

    fingerprint: str
    error: str
    place: str
    stack: str
    kept: list[object]
    """What the ids that it is found by belong to."""


class Source(NamedTuple):
    """A file that frames come from."""

    name: str
    rank: int
    """How surely it is the user's: the lower the surer."""
    package: str
    """The installed package that it belongs to, if to any."""


_OWN, _ENTRY, _GENERATED, _INSTALLED, _FOREIGN = range(5)

_class_names: dict[int, tuple[type, str]] = {}
_sources: dict[str, Source] = {}
_alike: dict[tuple[object, ...], Alike] = {}
_prints: dict[tuple[str, ...], str] = {}
_stacks: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}


def cause_of(error: BaseException, stage: str) -> Cause:
    """Why an event failed; a group of exceptions is told by its first member."""
    trace = _guarded(_trace_of, error, None)
    known = None if trace is None else _alike.get((stage, *trace))
    if known is not None:
        return _told_again(known, error, stage)
    cause = _worked_out(error, stage)
    if trace is not None:
        alike = Alike(
            cause.fingerprint, cause.error, cause.place, _stack_text(error), _behind(error)
        )
        _remember(_alike, (stage, *trace), alike)
    return cause


def _trace_of(error: BaseException) -> tuple[int, ...] | None:
    """Class and frames of an error by their ids; None if it has more to tell than its message."""
    hidden = _cause_of(error) is None and (_context_of(error) is None or _hides_context(error))
    cls = type(error)
    if not hidden or issubclass(cls, BaseExceptionGroup) or getattr(error, "diag", None):
        return None
    if getattr(error, "__notes__", None) is not None:
        return None
    trace = [id(cls)]
    step = _traceback_of(error)
    while step is not None:
        trace += (id(step.tb_frame.f_code), step.tb_lasti)
        step = step.tb_next
    return tuple(trace) if len(trace) <= _LONGEST_TRACE else None


def _behind(error: BaseException) -> list[object]:
    """What the ids of a trace belong to: kept, so that they do not become others'."""
    kept: list[object] = [type(error)]
    step = _traceback_of(error)
    while step is not None:
        kept.append(step.tb_frame.f_code)
        step = step.tb_next
    return kept


def _told_again(known: Alike, error: BaseException, stage: str) -> Cause:
    """Like one before: only the message is its own."""
    message = message_of(error)
    last = f"{known.error}: {message}\n" if message else f"{known.error}\n"
    text = _middle_cut(f"{known.stack}{last}", TRACEBACK_CHARACTERS)
    return Cause(known.fingerprint, known.error, stage, known.place, message, text)


def _worked_out(error: BaseException, stage: str) -> Cause:
    one = _first_member(error)
    name = class_name(type(one))
    message = message_of(one)
    nowhere = ((name, stage), stage)
    key, place = _guarded(_in_database, one, None) or _guarded(_in_code, one, None) or nowhere
    return Cause(
        _fingerprint(key),
        name,
        stage,
        place,
        message,
        _guarded(_traceback_text, error, f"{name}: {message}\n"),
    )


def class_name(cls: type) -> str:
    """The class as people name it: ``KeyError``, ``psycopg.errors.CheckViolation``."""
    known = _class_names.get(id(cls))
    if known is not None:
        return known[1]
    module, name = _guarded(_module_of, cls, None), _plain(_qualname_of(cls))
    if type(module) is str and not _NAMELESS_MODULES.match(module):
        name = f"{module}.{name}"
    name = storable(_cut(name, _SHORT_CHARACTERS))
    # The class itself is kept too: its id must not become another one's.
    _remember(_class_names, id(cls), (cls, name))
    return name


def message_of(error: BaseException) -> str:
    """``str(error)`` without passwords, short enough and fit for PostgreSQL."""
    return _cut(_told(_guarded(_text, error, "(it cannot be shown as text)")), MESSAGE_CHARACTERS)


def storable(text: str) -> str:
    """The text with what PostgreSQL refuses (NUL, halves of surrogate pairs) spelled out."""
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    return _plain(str(error))


def _plain(text: str) -> str:
    """A text, and not one of a subclass with methods of its own."""
    return str.__getitem__(text, slice(_SEEN_CHARACTERS))


def _told(text: str) -> str:
    if "=" in text or "://" in text:
        text = mask_text(text)
    return storable(text)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 3] + "..."


def _guarded(tell: Callable[[A], T], about: A, otherwise: T) -> T:
    """What is told about an error; strangers' code runs here, and may raise what it likes."""
    try:
        return tell(about)
    except BaseException:  # noqa: BLE001
        return otherwise


def _first_member(error: BaseException) -> BaseException:
    for _ in range(_DEEPEST_GROUP):
        # type(), not isinstance(): __class__ may lie.
        if not issubclass(type(error), BaseExceptionGroup):
            break
        error = _members_of(error)[0]
    return error


def let_go(error: BaseException) -> None:
    """Forget where an error was raised, once that is told.

    Its frames hold whatever the slice was made of, and the error itself: without this only the
    garbage collector could free them, much later, and the next slice gets memory that is cold.
    """
    one: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if one is None:
            return
        _forget_traceback(one, None)
        one = _cause_of(one) or _context_of(one)


# Where it failed


def _in_database(error: BaseException) -> Where | None:
    """The constraint, column or function that PostgreSQL names, if it is an error of its."""
    state = getattr(error, "sqlstate", None)
    diag = getattr(error, "diag", None)
    if diag is None or type(state) is not str or not _SQLSTATE.fullmatch(state):
        return None
    schema, table = _field(diag, "schema_name"), _field(diag, "table_name")
    for what in ("constraint", "column"):
        name = _field(diag, f"{what}_name")
        if name:
            place = f"{what} {name} on {table}" if table else f"{what} {name}"
            return ("sqlstate", state, schema, table, what, name), place
    if table:
        return ("sqlstate", state, schema, table), f"sqlstate {state} on {table}"
    function = _FUNCTION.match(_field(diag, "context"))
    if function:
        return ("sqlstate", state, function[1]), f"sqlstate {state} in {function[1]}"
    if _in_code(error):
        # The handler's own statement: its line says more than the code.
        return None
    return ("sqlstate", state), f"sqlstate {state}"


def _field(diag: Any, name: str) -> str:  # noqa: ANN401 - psycopg is not imported here
    value = getattr(diag, name, None)
    return storable(value[:_SHORT_CHARACTERS]) if type(value) is str else ""


def _in_code(error: BaseException) -> Where | None:
    """The innermost frame of the user's code."""
    best, found, package = _FOREIGN, None, None
    step = _traceback_of(error)
    while step is not None:
        source = _source(step.tb_frame.f_code.co_filename)
        rank = source.rank
        if rank == _INSTALLED and package is None:
            # Where we called it: there the user's own code may be an installed package.
            package = source.package
        if rank == _INSTALLED and source.package == package:
            rank = _ENTRY
        if rank <= best and rank < _INSTALLED:
            best, found = rank, step
        step = step.tb_next
    if found is None:
        return None
    code = found.tb_frame.f_code
    function = storable(code.co_qualname.rpartition("<locals>.")[2])
    file = _source(code.co_filename).name
    where = f"{file}:{found.tb_lineno}" if found.tb_lineno else file
    return (class_name(type(error)), file, function), f"{where} in {function}"


def _source(filename: str) -> Source:
    known = _sources.get(filename)
    if known is None:
        known = _describe(filename)
        _remember(_sources, filename, known)
    return known


def _describe(filename: str) -> Source:
    parts = re.split(r"[/\\]", filename)
    name = "/".join(parts[-2:] if parts[-1].startswith("__") else parts[-1:])
    name = storable(_cut(name, _SHORT_CHARACTERS))
    if filename.startswith(_OURS):
        return Source(name, _FOREIGN, "")
    installed = _PACKAGES.match(filename)
    if installed:
        package = installed[1].removesuffix(".py")
        return Source(name, _FOREIGN if package in _OUR_LIBRARIES else _INSTALLED, package)
    if filename.startswith((_PYTHON, "<frozen ")):
        return Source(name, _FOREIGN, "")
    # Dataclasses and their like make code without a file.
    return Source(name, _GENERATED if filename.startswith("<") else _OWN, "")


def _fingerprint(key: tuple[str, ...]) -> str:
    known = _prints.get(key)
    if known is None:
        known = hashlib.blake2b("\0".join(key).encode(), digest_size=6).hexdigest()
        _remember(_prints, key, known)
    return known


def _remember(known: dict[Any, Any], key: object, value: object) -> None:
    if len(known) >= _ROOM:
        known.clear()
    known[key] = value


# The traceback


def _traceback_text(error: BaseException) -> str:
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and len(seen) < _LONGEST_CHAIN and id(current) not in seen:
        seen.add(id(current))
        parts.append(_one_traceback(current))
        cause = _cause_of(current)
        between = _BECAUSE
        if cause is None and not _hides_context(current):
            cause, between = _context_of(current), _MEANWHILE
        if cause is not None:
            parts.append(between)
        current = cause
    if current is not None:
        parts.append("(earlier ones are left out)\n")
    return _middle_cut("".join(reversed(parts)), TRACEBACK_CHARACTERS)


def _one_traceback(error: BaseException) -> str:
    name, message = class_name(type(error)), message_of(error)
    last = f"{name}: {message}\n" if message else f"{name}\n"
    members = ""
    if issubclass(type(error), BaseExceptionGroup):
        some = _members_of(error)[:_MOST_MEMBERS]
        members = "".join(_indented(_one_traceback(member)) for member in some)
    return f"{_stack_text(error)}{last}{_guarded(_notes, error, '')}{members}"


def _indented(text: str) -> str:
    return "".join(f"  | {line}\n" for line in text.splitlines())


def _notes(error: BaseException) -> str:
    notes = getattr(error, "__notes__", None)
    if type(notes) is not list:
        return ""
    some = [_told(_plain(note)) for note in notes[:_MOST_NOTES] if type(note) is str]
    return "".join(f"{_cut(note, MESSAGE_CHARACTERS)}\n" for note in some)


def _stack_text(error: BaseException) -> str:
    """The frames from the user's first one on: how we got there is nobody's concern."""
    first = step = _traceback_of(error)
    if first is None:
        return ""
    while step is not None and _source(step.tb_frame.f_code.co_filename).rank == _FOREIGN:
        step = step.tb_next
    first = step = step or first
    shown: list[tuple[CodeType, int]] = []
    while step is not None:
        shown.append((step.tb_frame.f_code, step.tb_lasti))
        step = step.tb_next
    depth = len(shown)
    if depth > _FIRST_FRAMES + _LAST_FRAMES:
        del shown[_FIRST_FRAMES:-_LAST_FRAMES]
    # By id: two codes are equal when they differ in their files only.
    key = (depth, *[number for code, at in shown for number in (id(code), at)])
    known = _stacks.get(key)
    if known is None:
        # The codes are kept with it: their ids must not become others'.
        known = (_told(_format(first, depth)), [code for code, _ in shown])
        _remember(_stacks, key, known)
    return known[0]


def _format(first: TracebackType, depth: int) -> str:
    left_out = depth - _FIRST_FRAMES - _LAST_FRAMES
    if left_out <= 0:
        lines = traceback.format_tb(first)
    else:
        lines = [
            *traceback.format_tb(first, limit=_FIRST_FRAMES),
            f"  ... {left_out} frames ...\n",
            *traceback.format_tb(first, limit=-_LAST_FRAMES),
        ]
    return "Traceback (most recent call last):\n" + "".join(lines)


def _middle_cut(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    # The end says what happened, the beginning where.
    tail = characters * 2 // 3
    return text[: characters - tail - len(_CUT)] + _CUT + text[-tail:]
