"""When a run was last heard of, and from when on that is too long ago."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.registry.history import authorship
from holdfast.registry.saving.loop.notice import last_heard

STATE = {"w": np.zeros(3)}


def test_a_run_without_checkpoints_is_never_overdue(run):
    heard = last_heard(run.manifest, 10**15)
    created_ms = run.manifest.created_ms
    assert (heard.time_ms, heard.interval_ms, heard.is_overdue) == (created_ms, None, False)


@pytest.mark.parametrize("every_s", [100, 0.5])
def test_three_intervals_and_a_minute_are_too_long(run, every_s):
    with run.checkpointer(every_s=every_s) as checkpointer:
        checkpointer.step(1, STATE)
    newest_ms = run.manifest.latest().time_ms
    silence_ms = max(3 * every_s * 1000, 60_000)
    assert last_heard(run.manifest, newest_ms + int(silence_ms)).is_overdue is False
    late = last_heard(run.manifest, newest_ms + int(silence_ms) + 1)
    assert (late.time_ms, late.interval_ms, late.is_overdue) == (newest_ms, every_s * 1000, True)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of the writer, in seconds: set `now`."""
    set_to = SimpleNamespace(now=1000.0)
    own = SimpleNamespace(time=lambda: set_to.now)
    monkeypatch.setattr(authorship, "time", own)
    return set_to


def test_without_a_cadence_the_last_interval_counts(clock, run):
    for step, clock.now in ((1, 2000.0), (2, 2100.0), (3, 2150.0)):
        run.save({"w": np.full(3, step)}, step=step)
    assert last_heard(run.manifest, 2_300_000).is_overdue is False
    assert last_heard(run.manifest, 2_300_001).is_overdue is True
    assert last_heard(run.manifest, 0).is_overdue is False  # the reader's clock is behind
    run.status = "interrupted"
    assert last_heard(run.manifest, 2_300_001).is_overdue is False


def test_a_takeover_is_heard_too(clock, run, backend, open_registry):
    run.save(STATE, step=1)
    clock.now = 5000.0
    other = open_registry(backend).run("run")
    other.restore()
    other.save(STATE, step=1)  # the same step again: no new checkpoint
    assert last_heard(other.manifest, 5_000_000).time_ms == 5_000_000
