"""The one place that says in a sentence why a client of Kafka cannot be made, or is not let in.

librdkafka tells of a refused password or certificate beside the call that waits, which then ends
in a timeout: whoever waits listens, and is told the reason instead. And the one place that throws
a transactional producer away.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from sideline import kafka_properties
from sideline.errors import ConfigurationError, KafkaUnreachableError, SidelineError

C = TypeVar("C")

# One broker of several may be wrong, or away: the others have this long to answer.
_GRACE_SECONDS = 2.0
_PROBE_SECONDS = 10.0
_ABORT_SECONDS = 1.0
_SASL = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka's names
    KafkaError.SASL_AUTHENTICATION_FAILED,
}
_TLS = KafkaError._SSL  # noqa: SLF001
_TRANSPORT = KafkaError._TRANSPORT  # noqa: SLF001
_FILE = re.compile(r"\b(ssl\.[a-z.]+?\.(?:location|pem)) failed")
_ADDRESS = re.compile(r"^\w+://(?P<host>\[[^]]+\]|[^:/]+):(?P<port>\d+)/\w+: ")
_STATE = re.compile(r" \(after \d+ms in state \w+[^)]*\)$")
_HINT = "Check what is set: sideline config show --origin"

log = logging.getLogger(__name__)


def make(kind: type[C], properties: Mapping[str, Any], **own: Any) -> C:  # noqa: ANN401
    """A client; ConfigurationError if its properties do not fit together."""
    try:
        return kind({**properties, **own})  # type: ignore[call-arg]  # they come without types
    except KafkaException as error:
        raise _cannot_be(error.args[0].str(), properties) from None


def _cannot_be(text: str, properties: Mapping[str, Any]) -> ConfigurationError:
    found = _FILE.search(text)
    if found is None:
        message = f"the Kafka client cannot be set up: {plain(text, properties)}."
        return ConfigurationError(message, hint=_HINT)
    name = found[1]
    if name.endswith(".location") and not Path(str(properties.get(name))).is_file():
        message = f"{name} names {properties.get(name)}, and there is no such file."
    else:
        of_key = "key" in name
        rest = ", or ssl.key.password is not its password" if of_key else ""
        message = f"{name} cannot be used: it is not what it should be in PEM{rest}."
    return ConfigurationError(message, hint=_HINT)


def throw_away(producer: Producer) -> None:
    """Make a transactional producer harmless, so that its last reference may go.

    librdkafka 2.16 ends the whole process where a producer is destroyed while it registers
    partitions with its transaction (an assertion on AddPartitionsToTxn), so the transaction is
    given up first. Where that fails, it was over, or being committed, or the broker is away: then
    nothing registers any more.
    """
    try:
        producer.abort_transaction(_ABORT_SECONDS)
    except KafkaException as error:
        log.debug("the transaction could not be ended: %s", error)
    producer.purge()


def plain(text: str, properties: Mapping[str, Any]) -> str:
    """Words of librdkafka without what is secret in its properties, and without a full stop."""
    for name in kafka_properties.SECRET:
        secret = str(properties.get(name, ""))
        if secret:
            text = text.replace(secret, "***")
    return " ".join(text.split()).rstrip(". ")


class Ears:
    """Hears why a client is not let in: an ``error_cb``, asked when an answer does not come."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._properties = properties
        self._heard: KafkaError | None = None
        self._since = 0.0

    def __call__(self, error: KafkaError) -> None:
        """Remember what matters; librdkafka calls."""
        told = error.code() == _TRANSPORT and "SSL" in error.str()
        if not told and error.code() != _TLS and error.code() not in _SASL:
            return
        if self._heard is None:
            self._since = time.monotonic()
        self._heard = error

    def forget(self) -> None:
        """We were let in: what was heard before explains nothing that comes later."""
        self._heard = None

    def refusal(self, *, at_last: bool = False) -> SidelineError | None:
        """Why we are not let in; None if that is not known, or may still change."""
        heard = self._heard
        if heard is None or not (at_last or time.monotonic() - self._since > _GRACE_SECONDS):
            return None
        text = plain(heard.str(), self._properties)
        address = _ADDRESS.match(text)
        host, port = (address["host"], int(address["port"])) if address else ("", 0)
        where = f"{host}:{port}" if address else str(self._properties["bootstrap.servers"])
        text = _STATE.sub("", _ADDRESS.sub("", text)).rstrip(". ")
        if heard.code() in _SASL:
            message = f"Kafka at {where} refuses the credentials: {text}."
            hint = "Check sasl.mechanism, sasl.username and sasl.password.\n" + _HINT
        elif "certificate verify failed" in text:
            why = _why_not_trusted(host.strip("[]"), port, self._properties)
            message = f"the certificate of Kafka at {where} is not trusted: {why}."
            hint = "Check ssl.ca.location, the address, and the certificate's dates.\n" + _HINT
        else:
            message = f"no TLS with Kafka at {where}: {text}."
            hint = "Check security.protocol, and whether it wants a certificate of ours.\n" + _HINT
        return KafkaUnreachableError(message, hint=hint)


def _why_not_trusted(host: str, port: int, properties: Mapping[str, Any]) -> str:
    """Ask once more by other means: librdkafka has the same words for every reason."""
    try:
        context = ssl.create_default_context(
            cafile=properties.get("ssl.ca.location"), cadata=properties.get("ssl.ca.pem")
        )
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message).rstrip(".")
    except (OSError, ValueError):
        pass
    return "it is expired, of another host, or of an authority that is not known here"
