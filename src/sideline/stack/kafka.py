"""Kafka brokers in KRaft mode, each a detached process that is broker and controller in one.

The settings are for development and tests on one machine: small buffers and few internal
partitions, deletions and retention that happen within seconds. What decides about safety is
as in production: three brokers replicate three times and need two in sync.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from sideline.errors import StackError
from sideline.stack import faults, ports, processes
from sideline.stack.java import Java
from sideline.stack.processes import Identity
from sideline.stack.state import Service, log_file

START_SECONDS = 150
_STOP_SECONDS = 20
_POLL_SECONDS = 0.05
_FORMAT_SECONDS = 150

_HEAP = ("-Xms64m", "-Xmx256m")
# Beside the heap: a serial collector needs no tables of its own, the code cache and thread
# stacks get what a broker uses rather than what a server with 64 cores might, and buffers
# that a network thread keeps for itself stay small.
_FRUGAL = (
    "-XX:+UseSerialGC",
    "-XX:ReservedCodeCacheSize=64m",
    "-XX:MaxMetaspaceSize=128m",
    "-XX:MaxDirectMemorySize=64m",
    "-Xss512k",
    "-Djdk.nio.maxCachedBufferSize=262144",
)
# Only the quick compiler: a start takes 4.9 s of CPU instead of 7.6, and each of the first four
# million events, written and read, less than with the optimising one (2.5 s against 3.0 a million).
_QUICK = ("-XX:TieredStopAtLevel=1",)
_HARDENED = ("-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData", "-Djava.awt.headless=true")

_LOGGING = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="ERROR" shutdownHook="disable">
  <Appenders>
    <Console name="out"><PatternLayout pattern="%d %-5p %c{1} %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Root level="WARN"><AppenderRef ref="out"/></Root>
    <Logger name="kafka.server.KafkaRaftServer" level="INFO"/>
  </Loggers>
</Configuration>
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a broker runs on: a Java, and the jars."""

    java: Java
    jars: Path

    @property
    def version(self) -> str:
        """The version of Kafka that the jars hold."""
        names = sorted(jar.stem for jar in self.jars.glob("kafka_2.13-*.jar"))
        return names[-1].rpartition("-")[2] if names else "unknown"


def new_cluster() -> str:
    """A new cluster id: a uuid in the form that Kafka writes."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # A leading dash would be taken for an option by Kafka's own tool.
        if not text.startswith("-"):
            return text


def broker_names(count: int) -> list[str]:
    """The names of a stack's brokers."""
    return [f"kafka-{number}" for number in range(1, count + 1)]


def properties(directory: Path, broker: Service, cluster: Sequence[Service]) -> dict[str, str]:
    """The settings of one broker among the brokers of its cluster."""
    copies = str(min(3, len(cluster)))
    in_sync = str(max(1, min(3, len(cluster)) - 1))
    return {
        "process.roles": "broker,controller",
        "node.id": str(_number(broker)),
        "controller.quorum.voters": ",".join(
            f"{_number(each)}@{ports.LOOPBACK}:{each.controller_port}" for each in cluster
        ),
        "listeners": f"PLAINTEXT://{ports.LOOPBACK}:{broker.port},"
        f"CONTROLLER://{ports.LOOPBACK}:{broker.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{ports.LOOPBACK}:{broker.port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(directory / broker.name / "data"),
        # Safety as in production, for as many brokers as there are.
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
        "unclean.leader.election.enable": "false",
        # A mistyped topic must not come into being.
        "auto.create.topics.enable": "false",
        # Small: few internal partitions, small segments and indexes, few threads and buffers.
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "1",
        "log.segment.bytes": str(64 << 20),
        "log.index.size.max.bytes": str(1 << 20),
        "offsets.topic.segment.bytes": str(8 << 20),
        "transaction.state.log.segment.bytes": str(8 << 20),
        "log.cleaner.dedupe.buffer.size": str(8 << 20),
        "log.cleaner.io.buffer.size": str(128 << 10),
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        # Quick: what a test waits for happens within seconds.
        "group.initial.rebalance.delay.ms": "0",
        "log.initial.task.delay.ms": "1000",
        "log.retention.check.interval.ms": "1000",
        "log.segment.delete.delay.ms": "1000",
        "log.cleaner.backoff.ms": "1000",
        "broker.heartbeat.interval.ms": "1000",
        "broker.session.timeout.ms": "6000",
    }


def prepare(runtime: Runtime, directory: Path, cluster: Sequence[Service], name: str) -> None:
    """Write the settings of every broker, and make a data directory for those that have none."""
    for broker in cluster:
        with faults.explained("write to", directory):
            _write_settings(directory, broker, cluster)
    new = [broker for broker in cluster if not _formatted(directory, broker)]
    tools = [_start_format(runtime, directory, broker, name) for broker in new]
    for broker, tool in zip(new, tools, strict=True):
        _finish_format(directory, broker, tool)


def start(runtime: Runtime, directory: Path, broker: Service) -> Identity:
    """Start a broker that was prepared; it is not ready yet when this returns."""
    home = directory / broker.name
    with faults.explained("write to", directory):
        return processes.spawn(
            _java_command(runtime, home, "kafka.Kafka", home / "server.properties"),
            log=log_file(directory, broker.name),
            environ=_environ(),
            directory=directory,
        )


def await_ready(directory: Path, cluster: Sequence[Service]) -> None:
    """Wait until the cluster shows all its brokers; StackError as soon as one of them ends."""
    deadline = time.monotonic() + START_SECONDS
    while not all(ports.answers(broker.port) for broker in cluster):
        _check(directory, cluster, deadline)
        time.sleep(_POLL_SECONDS)
    while _visible(cluster) < len(cluster):
        _check(directory, cluster, deadline)


def stop(brokers: Sequence[Service]) -> None:
    """End the brokers, side by side."""
    living = [broker.process for broker in brokers if broker.process]
    for process in living:
        processes.send(process, signal.SIGTERM)
    # Those that go last have no majority to say goodbye to: one wait for all of them, and what
    # is still there then is killed. Nothing is lost by that, the next start reads more of the log.
    deadline = time.monotonic() + _STOP_SECONDS
    for process in living:
        if not processes.wait_ended(process, max(0.0, deadline - time.monotonic())):
            processes.end(process, how=signal.SIGKILL, within_seconds=_STOP_SECONDS)


def _number(broker: Service) -> int:
    return int(broker.name.rpartition("-")[2])


def _formatted(directory: Path, broker: Service) -> bool:
    return (directory / broker.name / "data" / "meta.properties").exists()


def _write_settings(directory: Path, broker: Service, cluster: Sequence[Service]) -> None:
    home = directory / broker.name
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    lines = (f"{key}={value}\n" for key, value in properties(directory, broker, cluster).items())
    (home / "server.properties").write_text("".join(lines))
    (home / "log4j2.xml").write_text(_LOGGING)


def _java_command(runtime: Runtime, home: Path, *what: str | Path) -> list[str | Path]:
    return [
        runtime.java.executable,
        *_HEAP,
        *_FRUGAL,
        *_QUICK,
        *_HARDENED,
        f"-Djava.io.tmpdir={home / 'tmp'}",
        f"-Dlog4j2.configurationFile={home / 'log4j2.xml'}",
        "-cp",
        f"{runtime.jars}/*",
        *what,
    ]


def _environ() -> dict[str, str]:
    """The environment of a broker: ours, with memory pools of the C library kept few."""
    return {**os.environ, "MALLOC_ARENA_MAX": "2"}


def _start_format(
    runtime: Runtime, directory: Path, broker: Service, cluster: str
) -> subprocess.Popen[str]:
    home = directory / broker.name
    tool = ("kafka.tools.StorageTool", "format", "--ignore-formatted", "--cluster-id", cluster)
    with faults.explained("write to", directory):
        return subprocess.Popen(
            _java_command(runtime, home, *tool, "--config", home / "server.properties"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environ(),
            text=True,
            errors="replace",
        )


def _finish_format(directory: Path, broker: Service, tool: subprocess.Popen[str]) -> None:
    log = log_file(directory, broker.name)
    with tool:
        try:
            said, _ = tool.communicate(timeout=_FORMAT_SECONDS)
        except BaseException:
            tool.kill()
            raise
    if tool.returncode != 0:
        with faults.explained("write to", directory):
            log.write_text(said)
        raise faults.ended("Kafka's storage tool", said, log)


def _check(directory: Path, cluster: Sequence[Service], deadline: float) -> None:
    for broker in cluster:
        log = log_file(directory, broker.name)
        if not broker.alive:
            raise faults.ended(f"the Kafka broker {broker.name}", faults.tail(log), log)
    if time.monotonic() > deadline:
        log = log_file(directory, cluster[0].name)
        raise StackError(
            f"Kafka was not ready within {START_SECONDS} seconds.",
            hint=f"Its log says how far it came: {log}.",
        )


def _visible(cluster: Sequence[Service]) -> int:
    """How many brokers the cluster shows to a client."""
    bootstrap = ",".join(f"{ports.LOOPBACK}:{broker.port}" for broker in cluster)
    client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        return len(client.list_topics(timeout=5).brokers)
    except KafkaException:
        return 0
