"""Why a client is not let in: heard beside the call that waits."""

from __future__ import annotations

from confluent_kafka import KafkaError

from sideline import clients
from sideline.clients import Ears

PROPERTIES = {"bootstrap.servers": "broker-1.example:9093", "sasl.password": "hunter2"}
DENIED = KafkaError(
    KafkaError._AUTHENTICATION,
    "sasl_ssl://broker-1.example:9093/bootstrap: SASL authentication error: no hunter2 here. "
    "(after 3ms in state AUTH_REQ)",
)
GONE = KafkaError(KafkaError._TRANSPORT, "Connection refused")


def test_a_refused_password_is_one_sentence_without_it():
    """The broker's own words, without address twice, state and secret (P4)."""
    ears = Ears(PROPERTIES)
    ears(DENIED)

    message = ears.refusal(at_last=True).message

    assert message == (
        "Kafka at broker-1.example:9093 refuses the credentials: "
        "SASL authentication error: no *** here."
    )


def test_other_brokers_have_a_moment_to_answer(monkeypatch):
    """One that refuses us does not speak for the others at once (P4)."""
    clock = [100.0]
    monkeypatch.setattr(clients.time, "monotonic", lambda: clock[0])
    ears = Ears(PROPERTIES)
    ears(DENIED)

    assert ears.refusal() is None
    clock[0] += 10
    assert ears.refusal() is not None


def test_what_is_over_explains_nothing():
    """A lost connection is no refusal, and one that was let in forgets (P4)."""
    ears = Ears(PROPERTIES)
    ears(GONE)
    assert ears.refusal(at_last=True) is None
    ears(DENIED)
    ears.forget()
    assert ears.refusal(at_last=True) is None
