"""Which of librdkafka's client properties a user may set, and why the others not.

What is not about reaching the cluster belongs to sideline: a setting that commits by itself
or reads uncommitted records would break the promises without a word.
"""

from __future__ import annotations

import difflib

_WHOLE_NUMBER = "a whole number"
_YES_NO = "true or false"
_TEXT = "text"
_SECRET = "secret text"  # noqa: S105 - the kind of a property
_PROTOCOLS = "plaintext, ssl, sasl_plaintext or sasl_ssl"
_MECHANISMS = "GSSAPI, PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER"

ALLOWED: dict[str, str] = {
    "broker.address.family": "any, v4 or v6",
    "broker.address.ttl": _WHOLE_NUMBER,
    "client.dns.lookup": "use_all_dns_ips or resolve_canonical_bootstrap_servers_only",
    "client.id": _TEXT,
    "client.rack": _TEXT,
    "connections.max.idle.ms": _WHOLE_NUMBER,
    "metadata.max.age.ms": _WHOLE_NUMBER,
    "reconnect.backoff.max.ms": _WHOLE_NUMBER,
    "reconnect.backoff.ms": _WHOLE_NUMBER,
    "retry.backoff.max.ms": _WHOLE_NUMBER,
    "retry.backoff.ms": _WHOLE_NUMBER,
    "sasl.kerberos.keytab": _TEXT,
    "sasl.kerberos.min.time.before.relogin": _WHOLE_NUMBER,
    "sasl.kerberos.principal": _TEXT,
    "sasl.kerberos.service.name": _TEXT,
    "sasl.mechanism": _MECHANISMS,
    "sasl.mechanisms": _MECHANISMS,
    "sasl.oauthbearer.client.id": _TEXT,
    "sasl.oauthbearer.client.secret": _SECRET,
    "sasl.oauthbearer.config": _SECRET,
    "sasl.oauthbearer.extensions": _TEXT,
    "sasl.oauthbearer.method": "default or oidc",
    "sasl.oauthbearer.scope": _TEXT,
    "sasl.oauthbearer.token.endpoint.url": _TEXT,
    "sasl.password": _SECRET,
    "sasl.username": _TEXT,
    "security.protocol": _PROTOCOLS,
    "socket.connection.setup.timeout.ms": _WHOLE_NUMBER,
    "socket.keepalive.enable": _YES_NO,
    "socket.nagle.disable": _YES_NO,
    "socket.receive.buffer.bytes": _WHOLE_NUMBER,
    "socket.send.buffer.bytes": _WHOLE_NUMBER,
    "socket.timeout.ms": _WHOLE_NUMBER,
    "ssl.ca.location": _TEXT,
    "ssl.ca.pem": _TEXT,
    "ssl.certificate.location": _TEXT,
    "ssl.certificate.pem": _TEXT,
    "ssl.cipher.suites": _TEXT,
    "ssl.crl.location": _TEXT,
    "ssl.curves.list": _TEXT,
    "ssl.endpoint.identification.algorithm": "none or https",
    "ssl.key.location": _TEXT,
    "ssl.key.password": _SECRET,
    "ssl.key.pem": _SECRET,
    "ssl.keystore.location": _TEXT,
    "ssl.keystore.password": _SECRET,
    "ssl.sigalgs.list": _TEXT,
}

SECRET = frozenset(name for name, kind in ALLOWED.items() if kind == _SECRET)

_PROGRESS = "sideline keeps the progress itself, with the effects"
_PUBLISHING = "sideline's own publishing depends on it"
_CERTIFICATE = "it would trust anybody; name the authority with ssl.ca.location"
_PROGRAM = "it would run a program of its own inside every client"
_START = "the pipeline's start= says where a new one begins, and lost events must be noticed"

REFUSED: dict[str, str] = {
    "acks": _PUBLISHING,
    "auto.commit.interval.ms": _PROGRESS,
    "auto.offset.reset": _START,
    "bootstrap.servers": "it has a setting of its own: SIDELINE_KAFKA, or bootstrap in [kafka]",
    "debug": "librdkafka's debug log may show secrets",
    "enable.auto.commit": _PROGRESS,
    "enable.auto.offset.store": _PROGRESS,
    "enable.idempotence": _PUBLISHING,
    "enable.partition.eof": "sideline needs it to find the end of a partition",
    "enable.sasl.oauthbearer.unsecure.jwt": "unsigned tokens prove nothing",
    "enable.ssl.certificate.verification": _CERTIFICATE,
    "group.id": "the consumer group is the pipeline's name",
    "group.instance.id": "the consumer group is the pipeline's name",
    "group.protocol": "partitions are given out by leases, not by the group",
    "isolation.level": "sideline reads committed records only",
    "max.in.flight": _PUBLISHING,
    "max.in.flight.requests.per.connection": _PUBLISHING,
    "metadata.broker.list": "it has a setting of its own: SIDELINE_KAFKA, or bootstrap in [kafka]",
    "partition.assignment.strategy": "partitions are given out by leases, not by the group",
    "plugin.library.paths": _PROGRAM,
    "request.required.acks": _PUBLISHING,
    "sasl.jaas.config": "it is Java's; use sasl.username and sasl.password",
    "sasl.kerberos.kinit.cmd": _PROGRAM,
    "ssl.engine.location": _PROGRAM,
    "ssl.truststore.location": "it is Java's; use ssl.ca.location with a PEM file",
    "ssl.truststore.password": "it is Java's; use ssl.ca.location with a PEM file",
    "transactional.id": _PUBLISHING,
}


def name_problem(name: str) -> str | None:
    """Why the property cannot be set, as the end of a sentence; None: it can."""
    if name in ALLOWED:
        return None
    if name in REFUSED:
        return f"cannot be set: {REFUSED[name]}"
    near = difflib.get_close_matches(name, ALLOWED, n=1, cutoff=0.75)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"is not a Kafka client property that can be set{guess}"


def value_problem(name: str, value: str) -> str | None:
    """Why an allowed property cannot have that value; None: it can. Never shows a secret."""
    kind = ALLOWED[name]
    if kind == _WHOLE_NUMBER:
        fits = value.isascii() and value.isdigit()
    elif kind == _YES_NO:
        fits = value in {"true", "false"}
    elif " or " in kind:
        choices = kind.replace(" or ", ", ").split(", ")
        fits = value.lower() in (choice.lower() for choice in choices)
    else:
        fits, kind = bool(value), "not empty"
    if fits:
        return None
    return f"is {value!r}; it must be {kind}"
