"""What a user declares: which events, which handler, and what is promised."""

from __future__ import annotations

import hashlib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from sideline.backoff import Backoff
from sideline.classify import kind_of
from sideline.durations import Duration, seconds
from sideline.effects import EFFECTS, Effect
from sideline.errors import ConfigurationError, NonRecoverable
from sideline.events import Event
from sideline.policies import Block, FloodGuard, Policy, Sideline, Skip
from sideline.sinks import Calls, Postgres, Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.engine.running import Running

Delivery = Literal["exactly-once", "at-least-once", "at-most-once"]
Start = str | datetime | Mapping[int, int]
Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)

DELIVERIES = ("exactly-once", "at-least-once", "at-most-once")
# Consumer group ids have no rules of their own; ours name schemas, topics and metrics too.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
# How long a call to the outside world may take before its worker is given up.
CALLS_TIMEOUT_SECONDS = 30.0


class Pipeline:
    """Events of some topics, applied by one handler, in order per key.

    The name is also the consumer group. Everything after ``topics`` has a default
    that is right for a consumer that updates data.
    """

    def __init__(  # noqa: PLR0913 - the whole declaration, by keyword
        self,
        name: str,
        topics: str | Sequence[str],
        *,
        sink: Sink | None = None,
        delivery: Delivery = "exactly-once",
        on_failure: Policy | None = None,
        recoverable: Sequence[type[BaseException] | Callable[[BaseException], bool]] = (),
        retry: Backoff | None = None,
        key: Callable[[Event], Any] | None = None,
        dedupe: None = None,
        start: Start = "earliest",
        concurrency: int = 1,
        slice_size: int = 25_000,
        fold: bool = True,
        guard: FloodGuard | None = None,
        stash: str = "ledger",
        independent: bool = False,
        effects: Sequence[type[Effect] | Effect] | None = None,
        handler_timeout: Duration | None = None,
        rate: float | None = None,
        prepare: None = None,
    ) -> None:
        self.name = name
        self.topics: tuple[str, ...] = (topics,) if isinstance(topics, str) else tuple(topics)
        self.sink: Sink = Postgres() if sink is None else sink
        self.delivery = delivery
        self.on_failure: Policy = Sideline() if on_failure is None else on_failure
        self.recoverable = tuple(recoverable)
        self.retry = Backoff() if retry is None else retry
        self.key = key
        self.start_at = start
        self.concurrency = concurrency
        self.slice_size = slice_size
        self.fold = fold
        self.guard = FloodGuard() if guard is None else guard
        self.effects = None if effects is None else tuple(effects)
        self.handler_timeout = (
            None
            if handler_timeout is None
            else seconds(handler_timeout, what=f"handler_timeout of pipeline {name!r}")
        )
        if self.handler_timeout is None and isinstance(self.sink, Calls):
            self.handler_timeout = CALLS_TIMEOUT_SECONDS
        self.rate = rate
        self.handle: Handler = _no_handler
        self.set_up: Callable[[], Any] | None = None
        self.tear_down: Callable[[Any], Any] | None = None
        self._check()
        # Part of the declaration, not built yet: better refused than silently left out.
        for what, given, only in (
            ("dedupe", dedupe, None),
            ("stash", stash, "ledger"),
            ("independent", independent, False),
            ("prepare", prepare, None),
        ):
            if given != only:
                self._refuse(f"{what}={given!r} is not available in this version.")

    def handler(self, function: H) -> H:
        """Declare the function that turns an event into effects."""
        parameters = _positional(function)
        if not 1 <= parameters <= 2:  # noqa: PLR2004 - (event) or (event, tx)
            message = (
                f"the handler of pipeline {self.name!r} takes {parameters} arguments; "
                "it gets the event, and the transaction if it takes two."
            )
            raise ConfigurationError(message, hint="Write def handler(event) or (event, tx).")
        if parameters == 2:  # noqa: PLR2004
            self._check_transaction(function)
        if self.delivery == "at-most-once" and inspect.iscoroutinefunction(function):
            self._refuse("at-most-once handles events one by one, so the handler cannot be async.")
        self.handle = function
        return function

    def setup(self, function: H) -> H:
        """Declare what runs once per worker process; its result is ``event.context``."""
        if _positional(function) != 0:
            self._refuse("the function of setup takes no arguments.", "Write def setup().")
        self.set_up = function
        return function

    def teardown(self, function: H) -> H:
        """Declare what ends a worker process; it gets what setup returned."""
        if _positional(function) != 1:
            self._refuse(
                "the function of teardown takes what setup returned, nothing else.",
                "Write def teardown(context).",
            )
        self.tear_down = function
        return function

    @property
    def has_handler(self) -> bool:
        """Whether a handler was declared."""
        return self.handle is not _no_handler

    @property
    def wants_transaction(self) -> bool:
        """Whether the handler takes the open transaction as its second argument."""
        return self.has_handler and _positional(self.handle) == 2  # noqa: PLR2004

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return inspect.iscoroutinefunction(self.handle)

    @property
    def version(self) -> str:
        """A short name of the handler's code, to tell the code that failed from the fixed one."""
        digest = hashlib.sha256()
        for function in (self.handle, self.key):
            if function is not None:
                _digest_code(digest, getattr(function, "__code__", None))
        return digest.hexdigest()[:12]

    def key_of(self, event: Event) -> Any:  # noqa: ANN401 - whatever the user's key= returns
        """What the event's order belongs to; None: the event stands alone."""
        return event.key if self.key is None else self.key(event)

    def recovers(self, error: BaseException) -> bool:
        """Whether the outside world is to blame, so that waiting helps (F1)."""
        if isinstance(error, NonRecoverable):
            return False
        if kind_of(error) == "recoverable":
            return True
        for rule in self.recoverable:
            if isinstance(rule, type):
                if isinstance(error, rule):
                    return True
            elif rule(error):
                return True
        return False

    def skips(self, error: BaseException) -> bool:
        """Whether an event that failed like this is left out and counted (F5)."""
        return isinstance(self.on_failure, Skip) and not self.recovers(error)

    def start(
        self,
        spark: SparkSession | None = None,
        *,
        once: bool = False,
        **options: Any,  # noqa: ANN401 - see Running.begin
    ) -> Running:
        """Run the pipeline in the background; see `sideline.engine.running.Running`."""
        from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

        return Running.begin(self, spark, once=once, **options)

    def __repr__(self) -> str:
        """Name and topics; never a sink's URL."""
        return f"Pipeline({self.name!r}, topics={self.topics!r})"

    def _check(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            self._refuse(
                "the name may hold letters, digits, '.', '_' and '-', at most 100 of them."
            )
        self._check_topics()
        if not isinstance(self.sink, Postgres | Calls):
            # By its type: somebody may have given a URL, with its password.
            kind = type(self.sink).__name__
            self._refuse(f"the sink is a {kind}; it is one of Postgres(url), Calls().")
        self._check_delivery()
        for what, number in (("concurrency", self.concurrency), ("slice_size", self.slice_size)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                self._refuse(f"{what} is {number!r}; it is a whole number from 1.")
        if self.rate is not None and not (isinstance(self.rate, int | float) and self.rate > 0):
            self._refuse(f"rate is {self.rate!r}; it is events per second, above 0.")
        _check_start(self.start_at, self._refuse)
        for effect in self.effects or ():
            if effect not in EFFECTS and not isinstance(effect, EFFECTS):
                self._refuse(f"effects= holds {effect!r}, which is not an effect.")

    def _refuse(self, message: str, hint: str | None = None) -> NoReturn:
        raise ConfigurationError(f"pipeline {self.name!r}: {message}", hint=hint)

    def _check_topics(self) -> None:
        if not self.topics:
            self._refuse("no topic is named.", 'Write Pipeline("login", topics="users").')
        for topic in self.topics:
            if not isinstance(topic, str) or not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
                self._refuse(f"{topic!r} is not a topic name.")
        if len(set(self.topics)) != len(self.topics):
            self._refuse("a topic is named twice.")

    def _check_delivery(self) -> None:
        if self.delivery not in DELIVERIES:
            self._refuse(f"delivery is {self.delivery!r}; it is one of {', '.join(DELIVERIES)}.")
        if self.delivery == "at-most-once" and not isinstance(self.on_failure, Skip):
            # Progress has passed the event before it fails: there is no way back.
            self._refuse(
                "at-most-once cannot keep an event that fails.",
                "Say on_failure=Skip(), or choose another delivery.",
            )
        if not isinstance(self.on_failure, Sideline | Block | Skip):
            self._refuse(
                f"on_failure={self.on_failure!r} is not available in this version.",
                "Use Sideline(), Block() or Skip().",
            )
        if self.delivery == "at-most-once" and self.concurrency > 1:
            self._refuse("at-most-once handles events one by one.", "Drop concurrency=.")
        if isinstance(self.sink, Calls) and self.delivery == "exactly-once":
            # The declared default would be a promise that nobody can keep for outside calls.
            self.delivery = "at-least-once"

    def _check_transaction(self, function: Handler) -> None:
        if inspect.iscoroutinefunction(function) or self.concurrency > 1:
            message = (
                f"pipeline {self.name!r}: a handler with the transaction runs event by event, "
                "so it can be neither async nor concurrent."
            )
            raise ConfigurationError(message, hint="Drop concurrency=, or return effects.")
        if not isinstance(self.sink, Postgres):
            message = f"pipeline {self.name!r}: only Postgres() has a transaction to hand over."
            raise ConfigurationError(message, hint="Write def handler(event).")


def _check_start(start: Start, refuse: Callable[..., None]) -> None:
    match start:
        case "earliest" | "latest":
            return
        case datetime():
            if start.tzinfo is None:
                refuse("start is a datetime without a time zone.", "Add tzinfo=UTC.")
        case Mapping():
            for partition, offset in start.items():
                if not (isinstance(partition, int) and isinstance(offset, int)) or (
                    partition < 0 or offset < 0
                ):
                    refuse(f"start holds {partition!r}: {offset!r}; both are numbers from 0.")
        case _:
            refuse(
                f"start is {start!r}.",
                'It is "earliest", "latest", a datetime or {partition: offset}.',
            )


def _no_handler(event: Event) -> None:
    message = f"no handler was declared for the pipeline that got event {event.id}."
    raise ConfigurationError(message)


def _positional(function: Handler) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _digest_code(digest: Any, code: types.CodeType | None) -> None:  # noqa: ANN401 - hashlib's
    if code is None:
        return
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _digest_code(digest, constant)
        elif isinstance(constant, frozenset):
            # The order in a set differs from process to process.
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())
