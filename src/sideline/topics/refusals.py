"""What brokers say of a record that they will never take, however often it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaError

REFUSALS: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_MSG,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - librdkafka's own names
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
# These are said of every record of a batch, also where one of them alone is to blame, or none:
# several may be too large together. librdkafka 2.16 names the one of INVALID_RECORD only if there
# are several.
OF_BATCHES: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_MSG,
    }
)


def refused(errors: Mapping[int, KafkaError]) -> dict[int, KafkaError]:
    """Of records that failed, by whatever names them, those that will never be taken as sent."""
    return {name: why for name, why in sorted(errors.items()) if why.code() in REFUSALS}


def culprits(errors: Mapping[int, KafkaError], *, alone: bool) -> dict[int, str]:
    """Those that are to blame themselves, and why; ``alone``: each was a batch of its own."""
    return {
        name: why.str()
        for name, why in refused(errors).items()
        if alone or why.code() not in OF_BATCHES
    }
