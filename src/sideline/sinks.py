"""Where a pipeline's effects go, as declared."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Postgres:
    """Rows in PostgreSQL. Without ``url``: the database of the settings."""

    url: str | None = dataclasses.field(default=None, repr=False)

    def __getstate__(self) -> tuple[None]:
        """Pickle without the URL: its password must not travel with the pipeline."""
        return (None,)

    def __setstate__(self, _state: tuple[None]) -> None:
        """Restore without the URL: workers get it outside the pipeline."""
        object.__setattr__(self, "url", None)


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """Nothing of ours: the handler acts on the outside world itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kafka:
    """Records in topics of the cluster that the events come from.

    ``bootstrap`` may say which cluster that has to be: another one is refused at the start.
    """

    bootstrap: str | None = None


Sink = Postgres | Calls | Kafka
