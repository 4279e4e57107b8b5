"""Every error that sideline raises on purpose, grouped by what the caller would do next.

::

    SidelineError                      exit  what the caller does
    ├── UsageError                       2   corrects the call
    │   └── ConfigurationError           2   corrects a setting, a flag or the declaration
    ├── CheckError                       3   reads what the check found
    ├── NotFoundError                    4   looks for another name
    ├── RefusedError                     5   reads the reason; the world is unchanged
    │   ├── AlreadyRunningError          5   stops the other one, or takes over
    │   ├── GuardrailError               5   chooses a policy that keeps the order
    │   ├── UnclearError                 5   brings back what Kafka or the ledger has lost
    │   └── FencedError                  5   nothing: another owner goes on
    ├── UnreachableError                 6   waits, or brings the service back
    │   ├── KafkaUnreachableError        6
    │   └── DatabaseUnreachableError     6
    ├── PartialError                     7   decides, then runs again
    │   ├── DataLostError                7   accepts the loss, or restores the topic
    │   ├── EventFailedError             7   mends the handler
    │   ├── NotDeliveredError            7   looks at what failed, and publishes it again
    │   └── UnclearCommitError           7   looks whether it was committed, before going on
    └── StackError                       1   mends the machine (embedded services only)

    Recoverable, NonRecoverable              raised by handlers, to decide by hand
    WorkerCrashed, HandlerTimeout            not recoverable: an event that ends its worker
    PrepareFailed                            not recoverable: the JVM's own error, by its name
    KnownDamaged, StillWaiting               why a run that applies a range again left it out
"""

from __future__ import annotations

from typing import Any, ClassVar


class SidelineError(Exception):
    """One sentence for the person who gets it, and the next step as ``hint``.

    ``code`` names the kind of error in docs, ledger and ``--json``;
    ``exit_code`` is what the command exits with.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel from Spark's workers to the driver: the default would lose the hint.
        return (_rebuild, (type(self), self.message, self.hint))

    def as_dict(self) -> dict[str, str | None]:
        """The error as ``--json`` shows it."""
        return {"error": self.code, "message": self.message, "hint": self.hint}


def _rebuild(cls: type[SidelineError], message: str, hint: str | None) -> SidelineError:
    return cls(message, hint=hint)


class UsageError(SidelineError):
    """The call itself is wrong."""

    code = "usage"
    exit_code = 2


class ConfigurationError(UsageError):
    """A setting, a flag or a pipeline's declaration is wrong."""

    code = "configuration"


class CheckError(SidelineError):
    """A check found something."""

    code = "check"
    exit_code = 3


class NotFoundError(SidelineError):
    """What was named does not exist."""

    code = "not-found"
    exit_code = 4


class RefusedError(SidelineError):
    """Doing it would break a promise."""

    code = "refused"
    exit_code = 5


class AlreadyRunningError(RefusedError):
    """Another driver holds the pipeline's place."""

    code = "already-running"


class GuardrailError(RefusedError):
    """The pipeline's policy could let an older event overwrite a newer one."""

    code = "guardrail"


class FencedError(RefusedError):
    """Another owner took over; nothing was written after that."""

    code = "fenced"


class UnclearError(RefusedError):
    """Whether a slice was published cannot be known: Kafka and the ledger contradict each other."""

    code = "unclear"


class UnreachableError(SidelineError):
    """A service did not answer within the time that was given."""

    code = "unreachable"
    exit_code = 6


class KafkaUnreachableError(UnreachableError):
    """Kafka did not answer."""

    code = "kafka-unreachable"


class DatabaseUnreachableError(UnreachableError):
    """PostgreSQL did not answer."""

    code = "database-unreachable"


class PartialError(SidelineError):
    """The work ended before its end; what was done stands."""

    code = "partial"
    exit_code = 7


class DataLostError(PartialError):
    """Kafka no longer has events that were not applied yet."""

    code = "data-lost"


class EventFailedError(PartialError):
    """An event could not be applied, and nothing may overtake it."""

    code = "event-failed"


class NotDeliveredError(PartialError):
    """Records that were published did not reach Kafka, or nobody knows whether they did."""

    code = "not-delivered"

    failures: tuple[Any, ...] = ()
    """The handles of what failed; of very many the first ones."""
    count: int = 0
    """How many failed."""


class UnclearCommitError(PartialError):
    """Kafka did not say whether a transaction was committed."""

    code = "unclear-commit"


class StackError(SidelineError):
    """The embedded stack cannot be started, stopped or used on this machine."""

    code = "stack"


def is_interrupt(error: BaseException | None) -> bool:
    """Whether somebody pressed Ctrl-C.

    A C extension that was waiting meanwhile may have turned it into a SystemError.
    """
    while isinstance(error, SystemError):
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


class Recoverable(Exception):  # noqa: N818 - a statement about the world, not an error of ours
    """Raised by a handler: the outside world is broken and will heal; try this event again."""


class NonRecoverable(Exception):  # noqa: N818 - see Recoverable
    """Raised by a handler: this event and this code do not fit; do not try again in vain."""


class WorkerCrashed(NonRecoverable):
    """An event's error: again and again the worker process died while handling it."""


class HandlerTimeout(NonRecoverable):
    """An event's error: its handler took longer than ``handler_timeout``."""


class PrepareFailed(NonRecoverable):
    """An event's error: what ``prepare=`` raised for it in the JVM."""


class PassedOver(Exception):  # noqa: N818 - see Recoverable
    """A run that applies a range again leaves this event out, without a try."""


class KnownDamaged(PassedOver):
    """It is dead, or a person gave it up (R5)."""


class StillWaiting(PassedOver):
    """It waits in the pipeline itself, and is applied when it is released."""


class ParkedByHand(Exception):  # noqa: N818 - see Recoverable
    """A person set this event aside, because its partition waited for it."""
