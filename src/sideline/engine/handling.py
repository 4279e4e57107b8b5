"""Runs the user's handler over a run of events, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sideline.causes import cause_of, let_go
from sideline.effects import Delete, Effect, Execute, Insert, Publish, Upsert
from sideline.engine import current
from sideline.engine.current import is_from_outside
from sideline.errors import GuardrailError, ParkedByHand, PassedOver, PrepareFailed
from sideline.guardrail import watched
from sideline.leaving import Plain, Record
from sideline.sinks import Kafka, Postgres
from sideline.slices import NOTHING, UNKNOWN_KEY, Aside, Copy, Failure, Handled, effects_of

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.events import Event
    from sideline.flood import Tally
    from sideline.pipeline import Fate, Pipeline

# A slice ends after this much handling, so that a lease ends in time.
HANDLING_SECONDS = 0.5
# A run of events is longer than the last one if that was quicker than this.
QUICK_SECONDS = 0.005
LONGEST_RUN = 256
# Events that fail in place are counted one by one: so many at a time.
MOST_WAITING = 2_000
NOBODY = Aside()
NOTHING_FORCED: Mapping[int, BaseException] = MappingProxyType({})


def allowed_effects(pipeline: Pipeline) -> tuple[type, ...]:
    """The effects that the pipeline's sink takes, and that it declared, if it declared any."""
    fits: tuple[type, ...] = ()
    if isinstance(pipeline.sink, Postgres):
        fits = (Upsert, Insert, Delete, Execute, Publish)
    elif isinstance(pipeline.sink, Kafka):
        # What a handler returns, and what becomes of it on the way to its home.
        fits = (Publish, Plain, Record)
    if pipeline.effects is None:
        return fits
    declared = {effect if isinstance(effect, type) else type(effect) for effect in pipeline.effects}
    made = {Plain, Record}
    return tuple(kind for kind in fits if kind in declared or kind in made)


def publishes(effects: tuple[Effect, ...]) -> bool:
    """Whether records to be published are among the effects."""
    return any(type(effect) is Publish for effect in effects)


def runs_sql(effects: tuple[Effect, ...]) -> bool:
    """Whether SQL of the handler's own is among the effects."""
    return any(type(effect) is Execute for effect in effects)


def stage_of(error: BaseException, stage: str) -> str:
    """Where it failed: what ``prepare=`` made of it is raised by the handler's stand-in."""
    return "prepare" if issubclass(type(error), PrepareFailed) else stage


def reason_of(error: BaseException, forced: BaseException | None) -> BaseException:
    """Why an event fails whose key nobody could tell: a person's word comes first."""
    by_hand = forced is not None and issubclass(type(forced), ParkedByHand)
    return forced if by_hand else error  # type: ignore[return-value]


def told(event: Event, stage: str, error: BaseException) -> Failure:
    """Why an event failed, with the error's frames let go: they would lie among the effects.

    What is freed before the rest of a slice, or after it, leaves holes: with every slice the next
    one's memory would be more scattered. So each failure is made once, and let go with what was
    made beside it (`release`).
    """
    cause = cause_of(error, stage)
    let_go(error)
    return Failure(event, stage, error, None, cause)


def handle(  # noqa: PLR0913 - what a slice depends on, by keyword
    pipeline: Pipeline,
    events: Sequence[Event],
    *,
    start: int,
    end: int,
    clock: Clock,
    aside: Aside = NOBODY,
    forced: Mapping[int, BaseException] = NOTHING_FORCED,
    tally: Tally | None = None,
    tries: dict[str, int] | None = None,
    copies: Sequence[Copy] | None = None,
) -> tuple[Handled, Failure | None]:
    """Handle events until one has to wait or the time for a slice is over.

    An event that fails for a reason of its own is set aside or left out, and so is whatever
    follows it by its key; ``forced`` names events, by offset, that fail without being tried.
    ``tries`` counts, by offset, how often events have failed in place; ``copies`` says where they
    come from, if from a retry topic.
    Returns what was handled and, if that ended it, the failure of the event behind it.
    """
    run = Run(pipeline, events, aside, tally, tries=tries, copies=copies)
    return run.slice(start, end, clock, forced)


class Run:
    """Events of one slice on their way through the handler."""

    def __init__(  # noqa: PLR0913 - what a slice depends on
        self,
        pipeline: Pipeline,
        events: Sequence[Event],
        aside: Aside,
        tally: Tally | None,
        *,
        tries: dict[str, int] | None = None,
        copies: Sequence[Copy] | None = None,
        handler: Callable[[Event], tuple[Effect, ...]] | None = None,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pipeline = pipeline
        self._allowed = allowed_effects(pipeline)
        self._handler = handler or watched(pipeline, self._allowed)
        self._made = handler is not None
        """The handler given returns effects that are applied already."""
        self._gone = gone
        """What an exception says is not the event's fault once this is so."""
        self._events = events
        self._aside = aside
        self._fresh = Aside()
        """Keys that failed in this slice."""
        self._tally = tally
        self._tries = tries
        self._copies = copies
        self._waiting: dict[int, Failure] = {}
        """Events that are to be tried again in place; those behind them are tried all the same."""
        self._counted = 0
        """Up to here the events are in the tally."""
        self._results: list[Any] = []
        self._mixed = False
        self.effects: list[Any] = []
        """What each event came to: of the usual slice, until it is over, without tuples around."""
        self._wrapped = self._made
        self._passed = array("q")
        """Where something without a tuple stands that is not an effect either; no objects, which
        would lie among the effects."""
        self.keys: list[Any] | None = None if pipeline.key is None else []
        self.skipped: dict[int, Failure] = {}
        self.parked: dict[int, Failure | None] = {}
        self.retrying: dict[int, Failure] = {}
        self.dead: dict[int, Failure] = {}
        self.failure: Failure | None = None

    def slice(
        self, start: int, end: int, clock: Clock, forced: Mapping[int, BaseException]
    ) -> tuple[Handled, Failure | None]:
        """Handle the events; see `handle`."""
        with current.of(self):
            if self._pipeline.key is None and not forced:
                self.in_runs(clock)
            else:
                self.one_by_one(clock, forced)
        self._wrap()
        count = len(self.effects)
        events = self._events
        if count < len(events):
            end, events = (self._copies or events)[count].offset, events[:count]
        handled = Handled(
            start,
            end,
            events,
            self.effects,
            self._mixed and any(map(runs_sql, self.effects)),
            self.keys,
            self.skipped,
            self.parked,
            self.retrying,
            self.dead,
            None if self._copies is None else self._copies[:count],
            publishes=(self._mixed or self._made) and any(map(publishes, self.effects)),
        )
        if not self._waiting:
            return handled, self.failure
        first = min(self._waiting)
        return handled.prefix(first), self._waiting[first]

    @property
    def place(self) -> int:
        """Where the event stands that is being handled now; another thread may ask."""
        return len(self.effects) + len(self._results)

    @property
    def event(self) -> Event | None:
        """The event that is being handled now."""
        place = self.place
        return self._events[place] if place < len(self._events) else None

    def in_runs(self, clock: Clock) -> None:
        """Handle ever longer runs of events, so that the loop itself costs next to nothing."""
        before = clock.monotonic()
        until = before + HANDLING_SECONDS
        length = 1
        while len(self.effects) < len(self._events) and self.failure is None:
            done = len(self.effects)
            run = self._free(self._events[done : done + length])
            if run:
                self._handle(run)
            now = clock.monotonic()
            if now > until:
                break
            count = len(self.effects) - done
            if count < len(run):
                # One failed: what was looked through behind it is looked through again.
                length = max(1, count)
            elif now - before < QUICK_SECONDS:
                length = min(length * 2, LONGEST_RUN)
            else:
                length = max(1, length // 2)
            before = now

    def one_by_one(self, clock: Clock, forced: Mapping[int, BaseException]) -> None:
        """Handle events with their keys derived, or with some that fail untried."""
        until = clock.monotonic() + HANDLING_SECONDS
        for event in self._events:
            self._handle_one(event, forced.get(event.offset))
            if self.failure is not None or clock.monotonic() > until:
                break

    def _free(self, run: Sequence[Event]) -> Sequence[Event]:
        """The events up to the first whose key is aside; those at the beginning are set aside."""
        aside, fresh = self._aside.kafka, self._fresh.kafka
        if not aside and not fresh:
            return run
        for place, event in enumerate(run):
            key = event.key
            if key in aside or key in fresh:
                if place:
                    return run[:place]
                break
        else:
            return run
        for event in run:
            key = event.key
            if key not in aside and key not in fresh:
                break
            self._follow()
        return ()

    def _handle(self, run: Sequence[Event]) -> None:
        results = self._results
        error: BaseException | None = None
        try:
            # What came before an exception stays in the list.
            results.extend(map(self._handler, run))
            if len(results) < len(run):
                # To map() it was the end of the events; to the handler it was an exception.
                error = StopIteration()
        # Whatever a handler raises, SystemExit included, is a failure of its event alone.
        except BaseException as raised:
            if is_from_outside(raised) or self._gone():
                raise
            error = raised
        self._results = []
        self._keep(results)
        if error is not None and self.failure is None:
            if self._events[len(self.effects)].key in self._fresh.kafka:
                # What an earlier event of its key returned was no good.
                self._follow()
            else:
                self._fail("handler", error)

    def _keep(self, results: list[Any]) -> None:
        """Take what handlers returned for the next events."""
        if not results:
            return
        if self._made:
            self.effects.extend(results)
            return
        kind = Plain if Plain in self._allowed else Upsert
        if kind in self._allowed and set(map(type, results)) <= {kind}:
            self.effects.extend(zip(results, strict=True) if self._wrapped else results)
            return
        self._mix()
        for result in results:
            # Handled before a generator of an earlier event of its key failed.
            if self._events[len(self.effects)].key in self._fresh.kafka:
                self._follow()
                continue
            self._keep_one(result)
            if self.failure is not None:
                return

    def _keep_one(self, result: Any) -> None:  # noqa: ANN401 - whatever a handler returns
        try:
            self.effects.append(effects_of(result, self._allowed))
        # A generator runs the user's code here.
        except BaseException as error:
            if is_from_outside(error):
                raise
            self._fail("handler", error)

    def _handle_one(self, event: Event, forced: BaseException | None) -> None:
        if isinstance(forced, PassedOver):
            # Before anybody looks at its bytes: they may be what is wrong with it.
            self.skipped[len(self.effects)] = Failure(event, "admit", forced)
            self._pass(UNKNOWN_KEY)
            return
        stage, key = "key", None
        try:
            if self.keys is not None:
                key = self._pipeline.key_of(event)
            if self._aside.holds(event, key) or self._fresh.holds(event, key):
                self._follow(key)
                return
            stage = "handler"
            if forced is not None:
                raise forced  # noqa: TRY301 - as if the handler had
            result = self._handler(event)
            some = result if self._made else effects_of(result, self._allowed)
        except BaseException as error:
            if is_from_outside(error) or self._gone():
                raise
            self._fail(stage, reason_of(error, forced), key)
            return
        self._mix()
        self.effects.append(some)
        if self.keys is not None:
            self.keys.append(key)

    def _follow(self, key: bytes | None = None) -> None:
        """The next event waits behind its key, untouched."""
        self.parked[len(self.effects)] = None
        self._counted += 1
        self._pass(key)
        if self.keys is not None and key is not None:
            # It may wait by the one of its keys: then what has the other waits too (K15).
            self._fresh.derived.add(key)

    def _fail(self, stage: str, error: BaseException, key: bytes | None = None) -> None:
        """The next event failed."""
        place = len(self.effects)
        event, stage = self._events[place], stage_of(error, stage)
        fate = self._fate(event, error)
        if issubclass(type(error), GuardrailError):
            # Set aside, or left in its retry topic; what comes behind it would be like it.
            self.failure = Failure(event, "guardrail", error)
        elif fate in {"parked", "dead"} and self._is_flood(place):
            stage, fate = "guard", "stops"
        if fate == "waits" and self._look_past(event):
            self._waiting[place] = Failure(event, stage, error)
            self._pass(key)
            return
        if fate in {"waits", "stops"}:
            self.failure = self.failure or Failure(event, stage, error)
            return
        failure = told(event, stage, error)
        kept = {"skipped": self.skipped, "retrying": self.retrying, "dead": self.dead}.get(fate)
        if kept is not None:
            kept[place] = failure
            self._pass(key)
            return
        self.parked[place] = failure
        if self.keys is None or stage == "key":
            if failure.event.key is not None:
                self._fresh.kafka.add(failure.event.key)
            self._pass(UNKNOWN_KEY)
        else:
            if key is not None:
                self._fresh.derived.add(key)
            self._pass(key)

    def _fate(self, event: Event, error: BaseException) -> Fate:
        if self._copies is not None:
            attempt = self._copies[len(self.effects)].attempt
            return self._pipeline.fate_of_copy(error, attempt=attempt)
        tries = self._tries.get(str(event.offset), 0) if self._tries else 0
        return self._pipeline.fate(error, tries=tries)

    def _look_past(self, event: Event) -> bool:
        """Whether events behind one that is tried again in place are tried along with it.

        Nothing of them is written before it is its turn, but what fails alike is counted alike:
        hundreds of events that fail wait once, not one after the other.
        """
        if self._tries is None or self._made or len(self._waiting) >= MOST_WAITING:
            return False
        if self._waiting:
            # The first one is counted by whoever lets the partition wait.
            offset = str(event.offset)
            self._tries[offset] = self._tries.get(offset, 0) + 1
        return True

    def _mix(self) -> None:
        """From here on events have any number of effects."""
        self._wrap()
        self._mixed = True

    def _wrap(self) -> None:
        """Put tuples around single effects, around all of them at once.

        Made one by one they would lie among the effects, and be freed in another order than they
        were made: with every slice the next one's memory would be more scattered.
        """
        if self._wrapped:
            return
        self._wrapped = True
        effects: list[tuple[Effect, ...]] = list(zip(self.effects, strict=True))
        for place in self._passed:
            effects[place] = NOTHING
        self.effects = effects

    def _pass(self, key: object) -> None:
        if not self._wrapped:
            self._passed.append(len(self.effects))
        self.effects.append(NOTHING)
        if self.keys is not None:
            self.keys.append(key)

    def _is_flood(self, place: int) -> bool:
        if self._tally is None:
            return False
        self._tally.pass_by(place - self._counted)
        if self._tally.too_many():
            return True
        self._tally.fail()
        self._counted = place + 1
        return False
