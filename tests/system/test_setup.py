"""What a worker process begins with: setup, and what comes of it when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from sideline.errors import PartialError
from tests.support.pipelines import applied, counted, faults, numbered, publish, recorder


def test_a_setup_that_fails_ends_the_run_at_once(finish, ready, kafka, topics):
    """One sentence with the user's own error, not round after round of crashes (E1)."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(10))
    pipeline = recorder("unready", topic)

    @pipeline.setup
    def prepare():
        message = "no such file of rates"
        raise LookupError(message)

    with pytest.raises(PartialError, match=r"setup of .*LookupError: no such file of rates"):
        finish(pipeline)
    assert counted(ready.database, "unready") == 0


def test_a_setup_that_heals_is_tried_again(finish, ready, kafka, topics, tmp_path):
    """What setup could not reach is waited for (F2)."""
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(10))
    pipeline = recorder("late", topic)
    flag = str(tmp_path / "tried")

    @pipeline.setup
    def prepare():
        if not Path(flag).exists():
            Path(flag).touch()
            message = "not up yet"
            raise ConnectionError(message)

    finish(pipeline)
    assert faults(applied(ready.database), sent) == []
