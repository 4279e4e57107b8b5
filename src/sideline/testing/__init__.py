"""Try a handler without Kafka, Spark or a database.

::

    from sideline.testing import event, run_slice

    result = run_slice(users, [event({"id": "7", "name": "Zoey"}, key="7")])
    assert result.effects == [(Upsert("users", {"id": "7", "name": "Zoey"}, key="id"),)]
"""

from sideline.testing.clock import FakeClock
from sideline.testing.slices import SliceResult, event, run_slice

__all__ = ["FakeClock", "SliceResult", "event", "run_slice"]
