"""What topics take: asked before a slice commits copies for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._config import ConfigResource

from sideline.errors import KafkaUnreachableError, NotFoundError, RefusedError

ANSWER_SECONDS = 5.0
# What was found out is believed for so long; what was missing is asked for again at once.
FRESH_SECONDS = 10.0
# Longer while nobody answers: a broker that is replaced does not change what a topic takes, and
# whoever waited for its successor here would wait once more where the records go.
KNOWN_SECONDS = 60.0
AGAIN_SECONDS = 1.0
# Kafka's default, for brokers that do not tell.
USUAL_BYTES = 1_048_588
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001


class Rooms:
    """How big a record may be, by topic; a worker's threads share what is known."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._kafka = dict(kafka)
        self._admin: AdminClient | None = None
        self._known: dict[str, tuple[float, tuple[int, int]]] = {}
        self._silent_at = -FRESH_SECONDS
        self._asking = threading.Lock()

    def __call__(self, topic: str) -> int:
        """The most bytes; raises where there is no such topic, or nobody may write to it."""
        return self.of(topic)[0]

    def of(self, topic: str) -> tuple[int, int]:
        """The most bytes of a record, and how many partitions there are; raises like the above."""
        began = time.monotonic()
        room = self._believed(topic, began)
        if room is not None:
            return room
        # One asks for all who want to know meanwhile: they share its client, and its patience.
        with self._asking:
            return self._believed(topic, began) or self._found_out(topic, began)

    def _believed(self, topic: str, now: float) -> tuple[int, int] | None:
        """What is known well enough, by now."""
        at, room = self._known.get(topic, (-KNOWN_SECONDS, (0, 0)))
        known = now - at < KNOWN_SECONDS
        quiet = now - self._silent_at < FRESH_SECONDS
        return room if now - at < FRESH_SECONDS or (known and quiet) else None

    def _found_out(self, topic: str, began: float) -> tuple[int, int]:
        at, room = self._known.get(topic, (-KNOWN_SECONDS, (0, 0)))
        known = began - at < KNOWN_SECONDS
        if self._silent_at > began:
            # Somebody waited in vain since then.
            raise _silent(topic)
        try:
            room = self._ask(topic, AGAIN_SECONDS if known else ANSWER_SECONDS)
        except KafkaUnreachableError:
            # Clients remember for long who answered them last; a new one asks around.
            self._admin = None
            self._silent_at = time.monotonic()
            if not known:
                raise
            return room
        self._known[topic] = began, room
        return room

    def _ask(self, topic: str, seconds: float) -> tuple[int, int]:
        if self._admin is None:
            self._admin = AdminClient({**self._kafka, "log_level": 0})
        partitions = self._partitions(self._admin, topic, seconds)
        return self._most_bytes(self._admin, topic, seconds), partitions

    def _partitions(self, admin: AdminClient, topic: str, seconds: float) -> int:
        futures = admin.describe_topics(
            TopicCollection([topic]),
            include_authorized_operations=True,
            request_timeout=seconds,
        )
        try:
            found = futures[topic].result(seconds + 1)
        except KafkaException as error:
            raise _translated(error, topic) from error
        except TimeoutError as error:
            raise _silent(topic) from error
        may = found.authorized_operations
        if may and AclOperation.WRITE not in may:
            raise _forbidden(topic)
        return len(found.partitions)

    def _most_bytes(self, admin: AdminClient, topic: str, seconds: float) -> int:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        futures = admin.describe_configs([resource], request_timeout=seconds)
        try:
            found = futures[resource].result(seconds + 1)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return USUAL_BYTES
            raise _translated(error, topic) from error
        except TimeoutError as error:
            raise _silent(topic) from error
        entry = found.get("max.message.bytes")
        return int(entry.value) if entry is not None and entry.value else USUAL_BYTES


def _translated(error: KafkaException, topic: str) -> Exception:
    code = error.args[0].code()
    if code in _MISSING:
        message = f"topic {topic!r} does not exist, and a copy has to go there."
        return NotFoundError(message, hint="`sideline topics create` makes it.")
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return _forbidden(topic)
    message = f"Kafka does not say what topic {topic!r} takes: {error.args[0].str()}."
    return KafkaUnreachableError(message)


def _forbidden(topic: str) -> RefusedError:
    message = f"topic {topic!r} may not be written to, and a copy has to go there."
    return RefusedError(message, hint="Give this client the right to write to it.")


def _silent(topic: str) -> KafkaUnreachableError:
    return KafkaUnreachableError(f"Kafka does not say what topic {topic!r} takes.")
