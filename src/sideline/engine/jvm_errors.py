"""What Spark says when a row fails in the JVM, in words that a person can use (pure).

Who is to blame is read from the classes of what was thrown, and never from what they say: an event
may well hold the words of a broken world.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sideline.causes import class_name
from sideline.classify import Rule, explain, explain_name

# What the scheduler says of a task, before the words of the task itself.
_TASK = re.compile(r"Job aborted due to stage failure: .*?\(TID \d+\) \([^()]*\): (.*)", re.DOTALL)
_HEAD = re.compile(r"((?:[A-Za-z_][\w$]*\.)*[A-Z][\w$]*)(?:(?:: | )(.*))?", re.DOTALL)
_NAME = re.compile(r"((?:\w+\.)*\w+)(?:: (.*))?")
_TRACEBACK = "Traceback (most recent call last):"
# Between two tracebacks of one failure; the last one is what was raised in the end.
_CHAINED = {
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
}
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w{5}\s*$")
_UDF = "PythonException"
# What only wraps what happened.
_WRAPPERS = frozenset({"SparkException", "Py4JJavaError", "QueryExecutionException"})
# The world outside: it hits every event, and heals by itself (F1). Of java.net by name: an address
# that cannot be read is its event's.
_WORLD = re.compile(
    r"org\.apache\.kafka\.|java\.nio\.channels\.|java\.util\.concurrent\.TimeoutException$"
    r"|java\.net\.(?:Connect|NoRouteToHost|PortUnreachable|Socket|SocketTimeout|UnknownHost)Exc"
    r"|java\.net\.http\.Http(?:Connect)?Timeout|java\.sql\.SQL(?:Transient|Recoverable)"
    r"|java\.sql\.SQLNonTransientConnection|(?:.*\.)?(?:Metadata)?FetchFailed"
    r"|ExecutorLostFailure$|(?:.*\.)?(?:Spark)?OutOfMemoryError$"
)
_FULL_DISK = ("java.io.IOException", "No space left on device")


class Thrown(NamedTuple):
    """An exception of the JVM: its class, with the package, and what it says."""

    name: str
    message: str


class Told(NamedTuple):
    """An error of the JVM."""

    name: str
    message: str
    heals: bool
    """Whether it is the world's, not the event's."""


def tell(thrown: Sequence[Thrown], rules: Sequence[Rule] = ()) -> Told:
    """Class and message of what happened, without what Spark put around it.

    ``thrown`` is the exception, then its cause, and so on; ``rules`` are a pipeline's
    ``recoverable=``, for what a UDF raises.
    """
    chain = [*thrown, *_of_task(thrown)]
    for one in chain:
        raised = _python(one.message) if _short(one.name) == _UDF else None
        if raised is not None:
            name, message = raised
            return Told(_short(name), _clean(message), _heals(name, rules))
    heals = any(map(_is_world, chain))
    # Spark's own errors say what is wrong with the row; the innermost one only how it was noticed.
    said = [one for one in chain if one.message.startswith("[")]
    inner = [one for one in chain if _short(one.name) not in _WRAPPERS]
    name, message = (said or inner[::-1] or chain or [Thrown("SparkException", "")])[0]
    return Told(_short(name), _clean(message) or "no reason given", heals)


def _of_task(thrown: Sequence[Thrown]) -> list[Thrown]:
    """What a task was ended by that threw nothing, or nothing that could be sent."""
    found = _TASK.match(thrown[-1].message) if thrown else None
    head = _HEAD.fullmatch(found[1]) if found else None
    return [Thrown(head[1], head[2] or "")] if head else []


def _is_world(one: Thrown) -> bool:
    name, words = _FULL_DISK
    return bool(_WORLD.match(one.name)) or (one.name == name and one.message.startswith(words))


def _python(text: str) -> tuple[str, str] | None:
    """A UDF's own exception: class and message behind its traceback, whatever they quote."""
    lines = iter(text.partition(_TRACEBACK)[2].splitlines())
    raised = _head(lines)
    # Chained ones follow, each with a traceback of its own.
    for line in lines:
        if line in _CHAINED and next(lines, None) == "" and next(lines, None) == _TRACEBACK:
            raised = _head(lines) or raised
    return raised


def _head(lines: Iterator[str]) -> tuple[str, str] | None:
    """The first line behind the frames, which are indented."""
    for line in lines:
        if line and not line.startswith((" ", "\t")):
            found = _NAME.fullmatch(line)
            return (found[1], found[2] or "") if found else None
    return None


def _heals(name: str, rules: Sequence[Rule]) -> bool:
    """By the class alone, like any failure of a handler: the exception stayed with its worker."""
    cls = _loaded(name)
    if cls is not None:
        return explain(cls, rules).kind == "recoverable"
    verdict = explain_name(name)
    named = any(isinstance(rule, type) and class_name(rule) == name for rule in rules)
    return named or (verdict is not None and verdict.kind == "recoverable")


def _loaded(name: str) -> type[BaseException] | None:
    """The class of that name, if this process has it; nothing is imported for it."""
    module, _, last = name.rpartition(".")
    for place in (module,) if module else ("builtins", "__main__"):
        found = vars(sys.modules[place]).get(last) if place in sys.modules else None
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _clean(message: str) -> str:
    lines = (_SQLSTATE.sub("", line).strip() for line in message.splitlines())
    return next(filter(None, lines), "")
