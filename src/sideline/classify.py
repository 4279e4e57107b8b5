"""Whose failure an exception is: the event's, the outside world's, or the deployment's (pure).

A white list says what heals by itself; in doubt it is the event's own.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from sideline.causes import class_name, message_of
from sideline.errors import NonRecoverable, Recoverable
from sideline.whitelist import (
    DATA_CLASSES,
    DATA_CODES,
    DEPLOYMENT_CLASSES,
    KNOWN,
    RECOVERABLE_CLASSES,
    RECOVERABLE_CODES,
    RECOVERABLE_ERRNOS,
    RECOVERABLE_GRPC,
    RECOVERABLE_KAFKA,
    RECOVERABLE_STATUSES,
    SQLSTATE_LENGTH,
    Family,
)

log = logging.getLogger(__name__)

Kind = Literal["data", "recoverable", "deployment"]
Rule = type[BaseException] | Callable[[BaseException], object]
"""What ``recoverable=`` holds: classes, and functions that look at the exception."""


class Verdict(NamedTuple):
    """Whose failure it is, and what decided."""

    kind: Kind
    rule: str
    """``by-hand``, ``pipeline``, ``sqlstate``, ``status``, ``kafka``, ``grpc``, ``connection``,
    ``group``, or ``default`` where nothing else had a say."""
    why: str


_DEEPEST = 4
_MOST_MEMBERS = 1_000
_ROOM = 512

# By the descriptors of the base classes: a subclass may have put anything in their place.
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__
_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
_members_of: Callable[[Any], tuple[BaseException, ...]]
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__

_Found = tuple[Family, str, str]
_found: dict[int, tuple[type, _Found | None]] = {}
_complained: dict[int, object] = {}


class _Asked(NamedTuple):
    """What a judge of the white list gets."""

    error: BaseException | None
    """None: a class was asked about, and no exception is at hand."""
    sqlstate: str | None = None
    status: int | None = None
    name: str = ""
    """Of the class that the list knows: the error's own, or an ancestor's."""
    attribute: str = ""
    depth: int = 0


def sqlstate_kind(code: str) -> Kind:
    """What an error of PostgreSQL says about the event that met it.

    In doubt it is the event's own: waiting would not mend it, and stopping for one row would
    stop everybody.
    """
    if code in DATA_CODES:
        return "data"
    if code in RECOVERABLE_CODES or code[:2] in RECOVERABLE_CLASSES:
        return "recoverable"
    if code[:2] in DEPLOYMENT_CLASSES:
        return "deployment"
    return "data"


def kind_of(error: BaseException) -> Kind:
    """The kind of any exception, by the white list alone."""
    return explain(error).kind


def explain(
    error: BaseException | type[BaseException],
    rules: Sequence[Rule] = (),
    *,
    sqlstate: str | None = None,
    status: int | None = None,
) -> Verdict:
    """Whose failure an exception is, and which rule says so; nothing here raises.

    What was raised by hand wins, then ``rules`` (a pipeline's ``recoverable=``), then the white
    list. Only the exception itself is judged, not what it was raised from. A class is judged as
    far as that goes without an exception of it; ``sqlstate`` and ``status`` are what one would
    carry.
    """
    # Never isinstance() of an exception: its __class__ may be a lie.
    is_class = issubclass(type(error), type)
    cls: type = error if is_class else type(error)  # type: ignore[assignment]
    instance: BaseException | None = None if is_class else error  # type: ignore[assignment]
    for by_hand, kind in _BY_HAND:
        if issubclass(cls, by_hand):
            return Verdict(kind, "by-hand", f"{class_name(cls)} is raised by hand")
    for rule in rules:
        if _matches(rule, cls, instance):
            return Verdict("recoverable", "pipeline", f"recoverable= has {_rule_name(rule)}")
    if issubclass(cls, BaseExceptionGroup):
        return _of_group(instance, rules)
    return _by_list(cls, _Asked(instance, sqlstate, status))


def explain_name(
    name: str, *, sqlstate: str | None = None, status: int | None = None
) -> Verdict | None:
    """The verdict on a class by its name alone, if the white list has it: it is not installed."""
    package, _, rest = name.partition(".")
    known = KNOWN.get(f"{package}.{rest.rpartition('.')[2]}") if package else None
    if known is None:
        return None
    if sqlstate:
        return _of_sqlstate(sqlstate)
    family, attribute = known
    return _JUDGES[family](_Asked(None, None, status, name, attribute))


_BY_HAND: tuple[tuple[type[BaseException], Kind], ...] = (
    (NonRecoverable, "data"),
    (Recoverable, "recoverable"),
)
_DEFAULT = Verdict("data", "default", "nothing on the white list matches")


# The pipeline's own rules


def _matches(rule: Rule, cls: type, error: BaseException | None) -> bool:
    """Whether a rule of the user's holds; one that fails holds for nothing and stops nobody."""
    try:
        if isinstance(rule, type):
            return issubclass(cls, rule)
        return error is not None and bool(rule(error))
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001 - a failing rule must not fail the slice
        if id(rule) not in _complained:
            _complained[id(rule)] = rule
            said = f"{class_name(type(problem))}: {message_of(problem)}"
            log.warning("recoverable= has %s, which failed: %s", _rule_name(rule), said)
        return False


def _rule_name(rule: object) -> str:
    if isinstance(rule, type):
        return class_name(rule)
    name = _read(rule, "__qualname__")
    name = name if isinstance(name, str) else class_name(type(rule))
    code = _read(rule, "__code__")
    line = _read(code, "co_firstlineno")
    return f"{name} (line {line})" if "<lambda>" in name and line else name


# The white list


def _of_group(group: BaseException | None, rules: Sequence[Rule]) -> Verdict:
    """Several at once wait only if waiting helps them all."""
    verdicts = [explain(member, rules) for member in _leaves(group)]
    for kind in ("data", "deployment", "recoverable"):
        for verdict in verdicts:
            if verdict.kind == kind:
                return Verdict(verdict.kind, "group", f"a member of the group: {verdict.why}")
    return Verdict("data", "group", "a group is recoverable if all its members are")


def _leaves(group: BaseException | None) -> Iterator[BaseException]:
    waiting = [] if group is None else [group]
    for _ in range(_MOST_MEMBERS):
        if not waiting:
            return
        one = waiting.pop()
        if issubclass(type(one), BaseExceptionGroup):
            waiting.extend(reversed(_members_of(one)))
        else:
            yield one


def _by_list(cls: type, asked: _Asked) -> Verdict:
    state = asked.sqlstate or _sqlstate_of(cls if asked.error is None else asked.error)
    if state:
        return _of_sqlstate(state)
    found = _find(cls)
    if found is None:
        return _DEFAULT
    family, attribute, name = found
    return _JUDGES[family](asked._replace(name=name, attribute=attribute))


def _find(cls: type) -> _Found | None:
    """The nearest ancestor that the white list knows."""
    known = _found.get(id(cls))
    if known is None:
        if len(_found) >= _ROOM:
            _found.clear()
        # The class itself is kept too: its id must not become another one's.
        known = _found[id(cls)] = (cls, _look_up(cls))
    return known[1]


def _look_up(cls: type) -> _Found | None:
    for ancestor in _mro_of(cls):
        try:
            module, name = _module_of(ancestor), _name_of(ancestor)
        except AttributeError:
            continue
        if type(module) is str and type(name) is str:
            package = "" if module == "builtins" else module.partition(".")[0] or "?"
            known = KNOWN.get(f"{package}.{name}")
            if known is not None:
                return (*known, class_name(ancestor))
    return None


def _of_sqlstate(code: str) -> Verdict:
    words = (
        DATA_CODES.get(code)
        or RECOVERABLE_CODES.get(code)
        or RECOVERABLE_CLASSES.get(code[:2])
        or DEPLOYMENT_CLASSES.get(code[:2])
        or DATA_CLASSES.get(code[:2])
    )
    why = f"SQLSTATE {code}" + (f" ({words})" if words else "")
    return Verdict(sqlstate_kind(code), "sqlstate", why)


def _of_connection(asked: _Asked) -> Verdict:
    return Verdict("recoverable", "connection", f"{asked.name} is on the white list")


def _of_status(asked: _Asked) -> Verdict:
    status = asked.status or _status_of(asked.error)
    if status is None:
        some = ", ".join(map(str, sorted(RECOVERABLE_STATUSES)))
        why = f"{asked.name} is recoverable with HTTP status {some} only"
        return Verdict("data", "status", why)
    kind: Kind = "recoverable" if status in RECOVERABLE_STATUSES else "data"
    return Verdict(kind, "status", f"HTTP status {status}")


def _of_kafka(asked: _Asked) -> Verdict:
    error = asked.error
    if error is None:
        why = f"{asked.name} is recoverable only where Kafka says that it is retriable"
        return Verdict("data", "kafka", why)
    arguments = _read(error, "args")
    # confluent-kafka wraps its error; kafka-python and aiokafka raise it.
    told = arguments[0] if type(arguments) is tuple and arguments else None
    code = _text(_call(told, "name"))
    flag = _read(error, "retriable") is True or _call(told, "retriable") is True
    heals = flag or (code in RECOVERABLE_KAFKA and _call(told, "fatal") is not True)
    kind: Kind = "recoverable" if heals else "data"
    return Verdict(kind, "kafka", f"{code or asked.name} is {'' if heals else 'not '}retriable")


def _of_grpc(asked: _Asked) -> Verdict:
    code = _text(_read(_call(asked.error, "code"), "name"))
    if code is None:
        some = " or ".join(sorted(RECOVERABLE_GRPC))
        return Verdict("data", "grpc", f"{asked.name} is recoverable with code {some} only")
    kind: Kind = "recoverable" if code in RECOVERABLE_GRPC else "data"
    return Verdict(kind, "grpc", f"gRPC code {code}")


def _of_errno(asked: _Asked) -> Verdict:
    number = _number(_read(asked.error, "errno"))
    if number in RECOVERABLE_ERRNOS:
        name = errno.errorcode.get(number, "EAI_AGAIN")
        return Verdict("recoverable", "connection", f"{name}: the network is out of reach")
    why = f"{asked.name} is recoverable only where its errno says that the network is out of reach"
    return _DEFAULT._replace(why=why)


def _of_what_is_within(asked: _Asked) -> Verdict:
    inner = _read(asked.error, asked.attribute)
    if not issubclass(type(inner), BaseException) or asked.depth >= _DEEPEST:
        return _DEFAULT._replace(why=f"{asked.name} is judged by its .{asked.attribute}")
    verdict = _by_list(type(inner), _Asked(inner, depth=asked.depth + 1))
    return verdict._replace(why=f"{asked.name}.{asked.attribute}: {verdict.why}")


_JUDGES: dict[Family, Callable[[_Asked], Verdict]] = {
    "connection": _of_connection,
    "status": _of_status,
    "kafka": _of_kafka,
    "grpc": _of_grpc,
    "errno": _of_errno,
    "within": _of_what_is_within,
}


# What strangers' objects say


def _sqlstate_of(error: object) -> str | None:
    for attribute in ("sqlstate", "pgcode"):
        state = _read(error, attribute)
        if type(state) is str and len(state) == SQLSTATE_LENGTH:
            return state
    return None


def _status_of(error: BaseException | None) -> int | None:
    response = _read(error, "response")
    metadata = response.get("ResponseMetadata") if type(response) is dict else None
    for status in (
        metadata.get("HTTPStatusCode") if type(metadata) is dict else None,
        _read(response, "status_code"),
        _read(error, "status"),
        _read(error, "code"),
    ):
        number = _number(status)
        if number is not None:
            return number
    return None


def _text(value: object) -> str | None:
    return value if type(value) is str else None


def _number(value: object) -> int | None:
    # An IntEnum too, as the number that it is.
    return int.__index__(value) if issubclass(type(value), int) else None  # type: ignore[arg-type]


def _read(thing: object, attribute: str) -> Any:  # noqa: ANN401 - whatever a stranger put there
    """An attribute, or None: strangers' properties run here, and may raise what they like."""
    try:
        return getattr(thing, attribute, None)
    except BaseException:  # noqa: BLE001
        return None


def _call(thing: object, method: str) -> Any:  # noqa: ANN401 - see _read
    function = _read(thing, method)
    try:
        return function() if callable(function) else None
    except BaseException:  # noqa: BLE001
        return None
