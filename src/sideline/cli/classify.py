"""`sideline classify`: what would happen to an exception, and which rule says so."""

from __future__ import annotations

import builtins
import difflib
import re
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import click

from sideline import errors, loading
from sideline.backoff import Backoff
from sideline.causes import class_name
from sideline.classify import Kind, Rule, Verdict, explain, explain_name
from sideline.cli.output import json_option, print_json
from sideline.durations import Duration, seconds
from sideline.errors import NotFoundError
from sideline.pipeline import Pipeline
from sideline.policies import Block, Policy, Sideline, Skip

_SQLSTATE = re.compile(r"(?=.*[0-9])[0-9A-Z]{5}", re.ASCII)
_HINT = "Write it as Python names it (psycopg.errors.UniqueViolation, app:Busy), or a SQLSTATE."

WORDS: dict[Kind, str] = {
    "recoverable": "recoverable",
    "data": "the event's own failure",
    "deployment": "the deployment's failure",
}
NOTES = {
    "42": "If one event fails with it while others like it pass, it is that event's own failure.",
    "57014": "If one event alone runs into it, again and again, it is that event's own failure.",
    "25P03": "The slice is made smaller before it is tried again.",
    "25P04": "The slice is made smaller before it is tried again.",
    "40P01": "A deadlock: the slice is done again at once.",
}


class Asked(NamedTuple):
    """What the command was asked about."""

    name: str
    cls: type[BaseException] | None
    """None: its library is not installed."""
    sqlstate: str | None
    status: int | None


@click.command()
@click.argument("exception")
@click.option("--pipeline", "target", metavar="APP:NAME", help="Whose recoverable= and policy.")
@click.option("--sqlstate", metavar="CODE", help="The code that the exception would carry.")
@click.option("--status", type=click.IntRange(100, 599), help="The HTTP status it would carry.")
@json_option
def classify(
    *,
    exception: str,
    target: str | None,
    sqlstate: str | None,
    status: int | None,
    as_json: bool,
) -> None:
    """Say what would happen to an event whose handler, or whose row, raises EXCEPTION.

    EXCEPTION is a class by its name (ConnectionResetError, psycopg.errors.UniqueViolation,
    app:Busy) or a SQLSTATE like 23505. Nothing is raised or made: what only an exception itself
    could tell, say with --sqlstate or --status.
    """
    modules: dict[str, ModuleType] = {}
    pipeline = _pipeline(target, modules) if target else None
    asked = _asked(exception, _checked(sqlstate), status, modules)
    rules = pipeline.recoverable if pipeline else ()
    verdict = _verdict(asked, rules)
    answer = _answer(asked, verdict, pipeline)
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['exception']} is {WORDS[verdict.kind]}: {verdict.why}.")
    for line in (answer["happens"], answer["change"], *answer["notes"]):
        click.echo(f"  {line}")


def _pipeline(target: str, modules: dict[str, ModuleType]) -> Pipeline:
    place, _, name = target.rpartition(":")
    if not place:
        # It says how to name one.
        return loading.load(target)
    modules[place] = loading.read(place)
    return loading.pick(modules[place], place, name)


def _checked(sqlstate: str | None) -> str | None:
    if sqlstate is not None and not _SQLSTATE.fullmatch(sqlstate.upper()):
        raise errors.UsageError(f"{sqlstate!r} is not a SQLSTATE.", hint="Write it like 23505.")
    return sqlstate and sqlstate.upper()


def _verdict(asked: Asked, rules: tuple[Rule, ...]) -> Verdict:
    if asked.cls is not None:
        return explain(asked.cls, rules, sqlstate=asked.sqlstate, status=asked.status)
    known = explain_name(asked.name, sqlstate=asked.sqlstate, status=asked.status)
    return known or explain(Exception)


# What is asked about


def _asked(
    name: str, sqlstate: str | None, status: int | None, modules: dict[str, ModuleType]
) -> Asked:
    if _SQLSTATE.fullmatch(name.upper()):
        cls = _of_code(name.upper())
        return Asked(class_name(cls), cls, name.upper(), status)
    found = _find(name, modules)
    if found is None:
        if explain_name(name) is None:
            package = name.partition(".")[0]
            message = f"there is no {package!r} here to import {name!r} from."
            hint = "The white list does not have it either. Install the library, or correct it."
            raise NotFoundError(message, hint=hint)
        return Asked(name, None, sqlstate, status)
    if not isinstance(found, type) or not issubclass(found, BaseException):
        raise NotFoundError(f"{name!r} is there, but it is not an exception.", hint=_HINT)
    return Asked(class_name(found), found, sqlstate, status)


def _of_code(code: str) -> type[BaseException]:
    """What psycopg raises for a SQLSTATE."""
    import psycopg  # noqa: PLC0415 - for a code only

    try:
        return psycopg.errors.lookup(code)
    except KeyError:
        return psycopg.DatabaseError


def _find(name: str, modules: dict[str, ModuleType]) -> object | None:
    """What the name stands for; None: its library is not installed."""
    place, colon, path = name.rpartition(":")
    if not all(part.isidentifier() for part in path.split(".")):
        raise _unknown(name, [])
    if colon:
        return _within(modules.get(place) or loading.read(place), path, name)
    for module in (builtins, *modules.values(), errors):
        with suppress(NotFoundError):
            return _within(module, path, name)
    if "." in name:
        return _dotted(name)
    raise _unknown(name, [each for known in (builtins, *modules.values()) for each in vars(known)])


def _dotted(name: str) -> object | None:
    """The longest part that is a module, then what is inside it: classes may be nested."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            module = loading.read(".".join(parts[:count]))
        except NotFoundError:
            continue
        return _within(module, ".".join(parts[count:]), name)
    return None


def _within(module: ModuleType, path: str, name: str) -> object:
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise _unknown(name, list(getattr(found, "__dict__", ())))
        found = getattr(found, part)
    return found


def _unknown(name: str, known: list[str]) -> NotFoundError:
    last = re.split(r"[.:]", name)[-1]
    near = difflib.get_close_matches(last, known, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    return NotFoundError(f"there is no exception {name!r}.{guess}", hint=_HINT)


# What is answered


def _answer(asked: Asked, verdict: Verdict, pipeline: Pipeline | None) -> dict[str, Any]:
    policy = pipeline.on_failure if pipeline else Sideline()
    fate, happens = _fate(verdict.kind, policy, pipeline.retry if pipeline else Backoff())
    return {
        "exception": asked.name,
        "pipeline": pipeline.name if pipeline else None,
        "kind": verdict.kind,
        "rule": verdict.rule,
        "why": verdict.why,
        "fate": fate,
        "happens": happens,
        "change": _change(asked, verdict),
        "notes": _notes(asked, verdict, pipeline),
    }


def _fate(kind: Kind, policy: Policy, retry: Backoff) -> tuple[str, str]:
    if kind == "recoverable":
        first, limit = _span(retry.first), _span(retry.limit)
        pauses = f"after {first}, then longer, at most {limit} apart"
        alert = f"an alert is raised after {_span(retry.alert_after)}"
        return "waits", f"It is tried again in place, {pauses}; nothing is parked; {alert}."
    if kind == "deployment":
        return "stops", "The pipeline stops; nothing is parked or left out."
    match policy:
        case Skip():
            return "skipped", "The event is left out and counted; everything else goes on."
        case Block():
            return "waits", "Its partition waits and tries it again, for ever; others go on."
        case _:
            return "parked", (
                "The event is parked at once, the later events of its key wait behind it, "
                "and all other keys go on."
            )


def _span(duration: Duration) -> str:
    return duration if isinstance(duration, str) else f"{seconds(duration):g}s"


def _change(asked: Asked, verdict: Verdict) -> str:
    match verdict.kind, verdict.rule:
        case _, "by-hand":
            return "To change that, raise something else in the handler."
        case _, "pipeline":
            return "To change that, take it out of recoverable=, or raise NonRecoverable."
        case "recoverable", _:
            return "Where it is the event's own failure, raise NonRecoverable in the handler."
        case "deployment", _:
            return "Mend the deployment and start again; where it heals by itself, recoverable=."
        case _:
            return (
                f"To wait instead, write recoverable=[{asked.name}], or a function that looks at "
                "the exception, or raise Recoverable in the handler."
            )


def _notes(asked: Asked, verdict: Verdict, pipeline: Pipeline | None) -> list[str]:
    notes = []
    if verdict.rule == "sqlstate":
        code = verdict.why.split()[1]
        notes += [NOTES[each] for each in (code, code[:2]) if each in NOTES]
    if asked.status is not None and verdict.rule != "status":
        notes.append(f"The status {asked.status} has no part in it.")
    rules = pipeline.recoverable if pipeline else ()
    functions = sum(not isinstance(rule, type) for rule in rules)
    if functions and verdict.rule not in {"by-hand", "pipeline"}:
        notes.append(
            f"Not asked: {functions} function{'s' * (functions > 1)} in recoverable=, "
            "which would need the exception itself."
        )
    return notes
