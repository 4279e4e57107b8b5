"""A broker that wants TLS and a password (SASL_SSL, SCRAM), with doors whose certificates are bad.

Built from the embedded broker's own settings; users are made when its directory is formatted.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from confluent_kafka.admin import AdminClient

from sideline.stack import kafka, ports
from sideline.stack.jars import broker_jars
from sideline.stack.java import find_java
from sideline.stack.kafka import Runtime
from sideline.stack.state import Service, log_file
from tests.support.certificates import Authority, Pair
from tests.support.waiting import wait_for

USER, PASSWORD = "zoey", "pa55word-of-zoey"
# Door -> what is wrong with its certificate.
DOORS = ("GOOD", "EXPIRED", "ELSEWHERE", "MUTUAL")


@dataclass(slots=True)
class SecureBroker:
    """Where its doors are, and what opens them."""

    directory: Path
    authority: Authority
    stranger: Authority
    client: Pair
    doors: dict[str, int]
    service: Service

    def address(self, door: str = "GOOD") -> str:
        """Host and port of a door."""
        return f"127.0.0.1:{self.doors[door]}"

    def properties(self, **changed: str) -> dict[str, str]:
        """Client properties that open the good door, or others."""
        return {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self.authority.certificate),
            **{name.replace("_", "."): value for name, value in changed.items()},
        }

    def environment(self, door: str = "GOOD", **changed: str) -> dict[str, str]:
        """The same as a user's environment."""
        named = self.properties(**changed).items()
        return {"SIDELINE_KAFKA": self.address(door)} | {
            f"SIDELINE_KAFKA__{name.upper().replace('.', '_')}": value for name, value in named
        }

    def admin(self) -> AdminClient:
        """A client by the good door."""
        return AdminClient({"bootstrap.servers": self.address(), **self.properties()})

    def stop(self) -> None:
        """End it."""
        kafka.stop([self.service])


def start(directory: Path) -> SecureBroker:
    """Start it and wait until it answers."""
    certificates = [directory / "authority", directory / "stranger"]
    for folder in certificates:
        folder.mkdir(parents=True)
    authority, stranger = (Authority(folder) for folder in certificates)
    pairs = {
        "GOOD": authority.sign("good"),
        "EXPIRED": authority.sign("expired", expired=True),
        "ELSEWHERE": authority.sign("elsewhere", "DNS:elsewhere.example"),
        "MUTUAL": authority.sign("mutual"),
    }
    taken: list[int] = []
    for _ in range(len(DOORS) + 2):
        taken.append(ports.free_port(taken))
    service = Service("kafka-1", taken[0], taken[1])
    doors = dict(zip(DOORS, taken[2:], strict=True))
    java = find_java()
    runtime = Runtime(java, broker_jars(java, progress=lambda *_: None))
    kafka._write_settings(directory, service, [service])
    settings = kafka.properties(directory, service, [service]) | _secured(directory, doors, pairs)
    settings["listeners"] += "".join(f",{d}://127.0.0.1:{port}" for d, port in doors.items())
    settings["advertised.listeners"] += "".join(
        f",{door}://127.0.0.1:{port}" for door, port in doors.items()
    )
    trusted = directory / "trusted.pem"
    trusted.write_text(authority.certificate.read_text())
    home = directory / service.name
    (home / "server.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    _format(runtime, home)
    service = replace(service, process=kafka.start(runtime, directory, service))
    client = authority.sign("client", "DNS:client.example")
    broker = SecureBroker(directory, authority, stranger, client, doors, service)

    def answers() -> bool:
        assert service.alive, log_file(directory, service.name).read_text()[-3000:]
        return all(map(ports.answers, doors.values()))

    wait_for(answers, what="the secure broker", within_seconds=150)
    return broker


def _secured(directory: Path, doors: dict[str, int], pairs: dict[str, Pair]) -> dict[str, str]:
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    protocols |= dict.fromkeys(doors, "SASL_SSL") | {"MUTUAL": "SSL"}
    made = {
        "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in protocols.items()),
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PEM",
        "listener.name.mutual.ssl.truststore.location": str(directory / "trusted.pem"),
    }
    for door, pair in pairs.items():
        store = directory / f"{door}.pem"
        store.write_text(pair.together())
        prefix = f"listener.name.{door.lower()}"
        made |= {
            f"{prefix}.ssl.keystore.type": "PEM",
            f"{prefix}.ssl.keystore.location": str(store),
            f"{prefix}.scram-sha-512.sasl.jaas.config": login,
        }
    return made


def _format(runtime: Runtime, home: Path) -> None:
    tool = ("kafka.tools.StorageTool", "format", "--cluster-id", kafka.new_cluster())
    user = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
    done = subprocess.run(
        kafka._java_command(
            runtime, home, *tool, "--config", home / "server.properties", "--add-scram", user
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
