"""What a user declares: which events, which handler, and what is promised."""

from __future__ import annotations

import hashlib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args

from sideline.backoff import Backoff
from sideline.classify import Rule, Verdict, explain
from sideline.dedupe import IdFunction, MessageId, declared
from sideline.durations import Duration, seconds
from sideline.effects import EFFECTS, Effect
from sideline.errors import ConfigurationError, GuardrailError, ParkedByHand, PassedOver
from sideline.events import Event
from sideline.keys import canonical
from sideline.policies import (
    Block,
    DeadLetter,
    Dialect,
    FloodGuard,
    Policy,
    RetryTopics,
    Sideline,
    Skip,
    Stop,
)
from sideline.sinks import Calls, Kafka, Postgres, Sink
from sideline.topics.names import OwnTopic, TopicNames, own_topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sideline.again import Again
    from sideline.engine.running import Running

Delivery = Literal["exactly-once", "at-least-once", "at-most-once"]
Fate = Literal["waits", "stops", "skipped", "parked", "retrying", "dead"]
Start = str | datetime | Mapping[int, int]
Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)

# Where the bytes of parked events are: here, in a topic of the pipeline's own, or where they were.
STASHES = ("ledger", "topic", "pointer")
DELIVERIES = ("exactly-once", "at-least-once", "at-most-once")
# Consumer group ids have no rules of their own; ours name schemas, topics and metrics too.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
# How long a call to the outside world may take before its worker is given up.
CALLS_TIMEOUT_SECONDS = 30.0
# Of an event whose failure is its own.
_FATES: dict[type, Fate] = {Block: "waits", Skip: "skipped", Stop: "stops"}


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
        recoverable: Sequence[Rule] = (),
        retry: Backoff | None = None,
        key: Callable[[Event], Any] | None = None,
        dedupe: MessageId | IdFunction | None = None,
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
        prepare: Callable[[DataFrame], DataFrame] | None = None,
        names: TopicNames | None = None,
    ) -> None:
        self.name = name
        self.topics: tuple[str, ...] = (topics,) if isinstance(topics, str) else tuple(topics)
        self.sink: Sink = Postgres() if sink is None else sink
        self.delivery = delivery
        self.on_failure: Policy = Sideline() if on_failure is None else on_failure
        self.recoverable = _rules(recoverable, self._refuse)
        self.retry = Backoff() if retry is None else retry
        self.key = key
        self.dedupe = _declared(dedupe, self._refuse)
        self.start_at = start
        self.concurrency = concurrency
        self.slice_size = slice_size
        self.fold = fold
        self.guard = FloodGuard() if guard is None else guard
        self.stash = stash
        self.independent = independent
        self.effects = None if effects is None else tuple(effects)
        self.handler_timeout = (
            None
            if handler_timeout is None
            else seconds(handler_timeout, what=f"handler_timeout of pipeline {name!r}")
        )
        if self.handler_timeout is None and isinstance(self.sink, Calls):
            self.handler_timeout = CALLS_TIMEOUT_SECONDS
        self.rate = rate
        self.names = TopicNames() if names is None else names
        self.again: Again | None = None
        """Set where this is a run that applies a range again; see `sideline.again`."""
        self.prepare = prepare
        self._prepare_code = _code_of(prepare)
        self.left_out: Callable[[Event], bool] | None = None
        """Set in workers: whether ``prepare=`` left an event out."""
        self.handle: Handler = _no_handler
        self.set_up: Callable[[], Any] | None = None
        self.tear_down: Callable[[Any], Any] | None = None
        self._check()

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
    def own_topics(self) -> tuple[OwnTopic, ...]:
        """The topics that the pipeline needs for itself: stash, retry and dead-letter topics."""
        retries = len(self.on_failure.delays) if isinstance(self.on_failure, RetryTopics) else 0
        return own_topics(
            self.names,
            self.name,
            self.topics,
            stash=self.stash == "topic",
            retries=retries,
            dead_letter=isinstance(self.on_failure, DeadLetter | RetryTopics),
        )

    @property
    def copies_failures(self) -> bool:
        """Whether events that fail leave as copies for topics of the group's own (F7, F8)."""
        return isinstance(self.on_failure, DeadLetter | RetryTopics)

    @property
    def publishes_exactly_once(self) -> bool:
        """Whether its slices are transactions of Kafka."""
        return isinstance(self.sink, Kafka) and self.delivery == "exactly-once"

    @property
    def delays_seconds(self) -> tuple[float, ...]:
        """How long each retry topic keeps an event, in the order of the chain."""
        if not isinstance(self.on_failure, RetryTopics):
            return ()
        what = f"delays of pipeline {self.name!r}"
        return tuple(seconds(delay, what=what) for delay in self.on_failure.delays)

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return inspect.iscoroutinefunction(self.handle)

    @property
    def version(self) -> str:
        """A short name of the handler's code, to tell the code that failed from the fixed one."""
        digest = hashlib.sha256()
        for function in (self.handle, self.key, self.dedupe and self.dedupe.of):
            if function is not None:
                _digest_code(digest, getattr(function, "__code__", None))
        digest.update(self._prepare_code)
        return digest.hexdigest()[:12]

    def key_of(self, event: Event) -> bytes | None:
        """What the event's order belongs to; None: the event stands alone."""
        return event.key if self.key is None else canonical(self.key(event))

    def verdict(self, error: BaseException) -> Verdict:
        """Whose failure it is: by hand, by ``recoverable=``, by the white list (F1)."""
        return explain(error, self.recoverable)

    def recovers(self, error: BaseException) -> bool:
        """Whether the outside world is to blame, so that waiting helps (F1)."""
        return self.verdict(error).kind == "recoverable"

    def fate(  # noqa: PLR0911 - a table, read from the top
        self, error: BaseException, *, own: bool = False, tries: int = 0
    ) -> Fate:
        """What becomes of an event that failed like this.

        It waits for the world to heal, or for ever (F2, F6); it is left out (F5) or set aside (F3);
        it is tried again later, elsewhere (F8), or given up with a copy (F7); or it is none of the
        event's fault, and stops the pipeline. ``own``: whoever met the error knows already that it
        is the event's, whatever its code says (K10). ``tries``: how often it failed before.
        """
        if issubclass(type(error), GuardrailError):
            return "parked"
        if issubclass(type(error), PassedOver):
            return "skipped"
        if issubclass(type(error), ParkedByHand):
            return "dead" if self.copies_failures else "parked"
        verdict = self.verdict(error)
        judged = not own or verdict.rule in {"by-hand", "pipeline"}
        if judged and verdict.kind == "deployment":
            return "stops"
        match self.on_failure:
            case DeadLetter(attempts):
                return "waits" if tries + 1 < attempts else "dead"
            case RetryTopics(delays):
                again = judged and verdict.kind == "recoverable" and tries < len(delays)
                return "retrying" if again else "dead"
        if judged and verdict.kind == "recoverable":
            return "waits"
        return _FATES.get(type(self.on_failure), "parked")

    def fate_of_copy(self, error: BaseException, *, own: bool = False, attempt: int) -> Fate:
        """The same for an event that failed again, coming from a retry topic (F8).

        Its topic may be one of an older policy: then what cannot heal by itself is given up. What
        the guardrail forbids stays where it is, unread (F9).
        """
        if issubclass(type(error), GuardrailError):
            return "stops"
        if isinstance(self.on_failure, RetryTopics):
            return self.fate(error, own=own, tries=attempt)
        verdict = self.verdict(error)
        judged = not own or verdict.rule in {"by-hand", "pipeline"}
        if judged and verdict.kind in {"recoverable", "deployment"}:
            return "waits" if verdict.kind == "recoverable" else "stops"
        return "dead"

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

    def foreach_batch(self, frame: DataFrame, number: int) -> None:
        """Apply a batch of a Structured Streaming query that reads the pipeline's topics.

        ``.writeStream.foreachBatch(users.foreach_batch)``: the same slices, fence, ledger and
        policies as under ``sideline run``. The batch is wholly committed when this returns; what is
        repeated is dropped by its offsets. Needs the extra ``sideline[dataframes]``.
        """
        if self.prepare is not None:
            self._refuse(
                "foreach_batch gets its rows from a query, so prepare= has nothing to do.",
                "Put the step into the query: .transform(enrich).",
            )
        try:
            from sideline.engine import batches  # noqa: PLC0415 - imports pyspark and pyarrow
        except ImportError as error:
            message = f"foreach_batch needs {error.name}, which is not installed."
            hint = "Install it with: pip install 'sideline[dataframes]'"
            raise ConfigurationError(message, hint=hint) from error
        batches.apply(self, frame, number)

    def __repr__(self) -> str:
        """Name and topics; never a sink's URL."""
        return f"Pipeline({self.name!r}, topics={self.topics!r})"

    def _check(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            self._refuse(
                "the name may hold letters, digits, '.', '_' and '-', at most 100 of them."
            )
        self._check_topics()
        if not isinstance(self.sink, Postgres | Calls | Kafka):
            # By its type: somebody may have given a URL, with its password.
            kind = type(self.sink).__name__
            self._refuse(f"the sink is a {kind}; it is one of Postgres(url), Kafka(), Calls().")
        if isinstance(self.sink, Kafka) and not isinstance(self.sink.bootstrap, str | None):
            self._refuse(f"Kafka({self.sink.bootstrap!r}): bootstrap is text, like kafka:9092.")
        self._check_delivery()
        for what, number in (("concurrency", self.concurrency), ("slice_size", self.slice_size)):
            if not _is_count(number):
                self._refuse(f"{what} is {number!r}; it is a whole number from 1.")
        if self.rate is not None and not (isinstance(self.rate, int | float) and self.rate > 0):
            self._refuse(f"rate is {self.rate!r}; it is events per second, above 0.")
        _check_start(self.start_at, self._refuse)
        if not isinstance(self.independent, bool):
            self._refuse(f"independent is {self.independent!r}; it is True or False.")
        for effect in self.effects or ():
            if effect not in EFFECTS and not isinstance(effect, EFFECTS):
                self._refuse(f"effects= holds {effect!r}, which is not an effect.")
        self._check_own_topics()
        self._check_prepare()

    def _check_prepare(self) -> None:
        prepare = self.prepare
        if prepare is None:
            return
        if not callable(prepare):
            self._refuse(f"prepare is {prepare!r}; it is a function of a DataFrame.")
        if _positional(prepare) != 1:
            self._refuse(
                "the function of prepare takes the DataFrame, nothing else.",
                "Write def prepare(df), and return df with more columns.",
            )
        if isinstance(self.on_failure, RetryTopics):
            self._refuse("prepare= does not go with retry topics in this version.")
        if not isinstance(self.sink, Postgres):
            self._refuse("prepare= goes with Postgres() only, in this version.")

    def _refuse(self, message: str, hint: str | None = None) -> NoReturn:
        raise ConfigurationError(f"pipeline {self.name!r}: {message}", hint=hint)

    def _check_own_topics(self) -> None:
        if self.stash not in STASHES:
            self._refuse(f"stash is {self.stash!r}; it is one of {', '.join(STASHES)}.")
        if not isinstance(self.names, TopicNames):
            self._refuse(f"names is {self.names!r}; it is TopicNames(...).")
        # Names that clash are refused before anything is written to them (F11).
        _ = self.own_topics

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
        self._check_policy()
        self._check_guard()
        if self.delivery == "at-most-once" and self.concurrency > 1:
            self._refuse("at-most-once handles events one by one.", "Drop concurrency=.")
        if isinstance(self.sink, Calls) and self.delivery == "exactly-once":
            # The declared default would be a promise that nobody can keep for outside calls.
            self.delivery = "at-least-once"

    def _check_policy(self) -> None:
        policy = self.on_failure
        if isinstance(policy, DeadLetter | RetryTopics):
            dialects = get_args(Dialect)
            if policy.dialect is not None and policy.dialect not in dialects:
                self._refuse(
                    f"dialect is {policy.dialect!r}; it is one of {', '.join(dialects)}, or None."
                )
        if isinstance(policy, DeadLetter):
            if not _is_count(policy.attempts):
                self._refuse(f"attempts is {policy.attempts!r}; it is a whole number from 1.")
        elif isinstance(policy, RetryTopics):
            if isinstance(policy.delays, str) or not policy.delays:
                self._refuse(
                    f"delays is {policy.delays!r}; it is a list of durations.",
                    'Write RetryTopics(delays=("10s", "1m", "10m")).',
                )
            # Whatever is no duration is refused there.
            _ = self.delays_seconds
        elif isinstance(policy, Skip):
            if not _is_share(policy.alarm):
                self._refuse(
                    f"alarm is {policy.alarm!r}; it is a share of the events, from 0 to 1.",
                    "Write Skip(alarm=0.01) for one in a hundred.",
                )
        elif not isinstance(policy, Sideline | Block | Skip | Stop):
            self._refuse(
                f"on_failure={policy!r} is not a policy.",
                "Use Sideline(), Block(), Skip(), DeadLetter() or RetryTopics().",
            )

    def _check_guard(self) -> None:
        guard = self.guard
        if not isinstance(guard, FloodGuard):
            self._refuse(f"guard is {guard!r}; it is FloodGuard(share=0.5, of=1000, in_a_row=100).")
        if not _is_share(guard.share) or not guard.share:
            self._refuse(
                f"share is {guard.share!r}; it is a share of the events, above 0 and up to 1.",
                "Write FloodGuard(share=0.5) for every second one.",
            )
        for what in ("of", "in_a_row"):
            if not _is_count(number := getattr(guard, what)):
                self._refuse(f"{what} is {number!r}; it is a whole number from 1.")

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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _rules(given: Sequence[Rule], refuse: Callable[..., NoReturn]) -> tuple[Rule, ...]:
    """What ``recoverable=`` holds, if each of it can say something about an exception."""
    hint = "Write recoverable=[SomeError, lambda error: ...]."
    if isinstance(given, type) or not isinstance(given, Iterable):
        refuse(f"recoverable is {given!r}; it is a list.", hint)
    for rule in (rules := tuple(given)):
        if isinstance(rule, type):
            fits = issubclass(rule, BaseException)
        else:
            # What a coroutine function returns is always true.
            fits = callable(rule) and not inspect.iscoroutinefunction(rule)
        if not fits:
            refuse(f"recoverable= holds {rule!r}, which judges no exception.", hint)
    return rules


def _declared(given: object, refuse: Callable[..., NoReturn]) -> MessageId | None:
    try:
        return declared(given)
    except ConfigurationError as error:
        refuse(error.message, error.hint)


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


def _code_of(function: Handler | None) -> bytes:
    """A function's code in a few bytes; nothing for none."""
    if function is None:
        return b""
    digest = hashlib.sha256()
    _digest_code(digest, getattr(function, "__code__", None))
    return digest.digest()


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
