"""One transaction of a publisher: all of its records are seen, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from sideline.deliveries import Book
from sideline.errors import (
    FencedError,
    NotDeliveredError,
    PartialError,
    SidelineError,
    UnclearCommitError,
)

if TYPE_CHECKING:
    from sideline.publisher import Publisher

# A call that waits longer would not notice Ctrl-C.
_STEP_SECONDS = 2.0
_FENCED = {
    KafkaError._FENCED,  # noqa: SLF001 - librdkafka's name
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}


class Transaction:
    """``with publisher.transaction():`` commits at its end, and aborts when the body raises."""

    def __init__(self, publisher: Publisher, producer: Producer, transactional_id: str) -> None:
        self._publisher = publisher
        self._producer = producer
        self._id = transactional_id
        self.book = Book(producer)

    def __enter__(self) -> Self:
        """Begin."""
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            raise self._broken(error.args[0]) from error
        self._publisher._enter(self)  # noqa: SLF001 - one thing in two files
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Commit, or abort if the body raised."""
        self._publisher._leave()  # noqa: SLF001 - see __enter__
        if error is None:
            self._commit()
            return
        try:
            self._abort()
        except SidelineError as worse:
            error.add_note(f"Besides: {worse.message}")
        failure = self.book.settle()
        # Those that only shared its fate come last.
        if failure is not None and not failure.failures[0].purged:
            error.add_note(f"Besides, before it was aborted {failure.message}")

    def _commit(self) -> None:
        try:
            failed = self._repeated(self._producer.commit_transaction)
        except BaseException as error:
            error.add_note(self._unclear(str(type(error).__name__)).message)
            raise
        if failed is None:
            self._hear()
            return
        if failed.txn_requires_abort():
            self._abort()
            failure = self.book.settle()
            reason = failure.message if failure else _sentence(failed)
            message = f"the transaction was aborted, and nothing of it is seen: {reason}"
            raise _with(NotDeliveredError(message, hint="Begin it anew."), failure)
        if failed.fatal():
            raise self._broken(failed)
        raise self._unclear(_sentence(failed))

    def _abort(self) -> None:
        self.book.aborted = True
        failed = self._repeated(self._producer.abort_transaction)
        self._hear()
        if failed is not None:
            raise self._broken(failed)
        if self.book:
            # librdkafka would purge the first records of the next transaction as well (seen with
            # 2.16): what comes next goes through a client that knows nothing of this one.
            self.book.producer = None
            self._publisher._connect()  # noqa: SLF001 - see __enter__

    def _repeated(self, call: Callable[[float], None]) -> KafkaError | None:
        """Call until it is done, it cannot be, or the time is over."""
        until = time.monotonic() + self._publisher.timeout_seconds
        while True:
            try:
                call(_STEP_SECONDS)
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                if not reason.retriable() or time.monotonic() > until:
                    return reason
            else:
                return None

    def _hear(self) -> None:
        """Let every handle know what became of its record."""
        while len(self._producer):
            self._producer.poll(0.1)

    def _broken(self, reason: KafkaError) -> SidelineError:
        """The publisher can do no more: nothing says what became of the transaction but this."""
        if reason.code() in _FENCED:
            message = (
                f"another publisher began with the transactional id {self._id!r}; "
                "this one is out, and its open transaction was aborted by that."
            )
            hint = "One id, one publisher at a time. Make a new one only if the other has ended."
            error: SidelineError = FencedError(message, hint=hint)
        else:
            message = f"the publisher cannot go on: {_sentence(reason)}."
            error = PartialError(message, hint="Make a new one; what was not committed is aborted.")
        self._publisher._give_up(error)  # noqa: SLF001 - see __enter__
        return error

    def _unclear(self, reason: str) -> UnclearCommitError:
        message = (
            "Kafka did not say whether the transaction was committed: either all of it is seen, "
            f"or nothing ({reason.rstrip('.')})."
        )
        hint = (
            f"Make a new Publisher(transactional_id={self._id!r}): its start ends what is open.\n"
            "Then look for one of the records before you publish them again."
        )
        error = UnclearCommitError(message, hint=hint)
        self._publisher._give_up(error)  # noqa: SLF001 - see __enter__
        return error


def begin(producer: Producer, transactional_id: str, timeout_seconds: float) -> None:
    """Let the broker know the publisher; whoever had the id before is out."""
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            producer.init_transactions(_STEP_SECONDS)
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            if reason.retriable() and time.monotonic() < until:
                continue
            _refuse_begin(reason, transactional_id, error)
        return


def _refuse_begin(reason: KafkaError, transactional_id: str, error: Exception) -> NoReturn:
    message = f"no transactions with the id {transactional_id!r}: {_sentence(reason)}."
    raise PartialError(message, hint="Check that Kafka answers, and the id's ACLs.") from error


def _sentence(reason: KafkaError) -> str:
    return f"{reason.str().rstrip('.')} ({reason.name()})"


def _with(error: NotDeliveredError, failure: NotDeliveredError | None) -> NotDeliveredError:
    if failure is not None:
        error.failures, error.count = failure.failures, failure.count
    return error
