"""The health of a registry: epochs, writers, mirrors, the journal, findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast import Retention, sync
from holdfast.registry.face.factory import open_on
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.settings import Journal
from holdfast.registry.ui.pages.health import VIEW, health_view, journal_view, mirror_view
from holdfast.registry.ui.pages.view import Asked
from tests.registry.ui.sources import source_of
from tests.support.faults import flip
from tests.support.stores import contents, new_backend


def test_the_epoch_and_the_writers_are_those_of_the_store(reg, backend) -> None:
    run = reg.create_run("r")
    for step in (1, 2):
        run.save({"w": np.full(1000, step, np.float32)}, step=step)
    with reg.create_run("done") as done:
        done.save({"a": 1}, step=1)
    run.retention.prune(Retention(last=1))
    reg.gc(grace_s=0)
    with source_of(backend) as source:
        found = health_view(source)
        with source.meter.measure() as used:
            again = health_view(source)
    # The runs, the epochs and the newest one's time; whether two runs have grown.
    assert used.calls == {"list": 2, "stat": 1, "get": 2}
    assert (found.epoch.number, found.epoch.kind, found.epoch.trouble) == (1, "sweep", None)
    assert abs(found.epoch.time_ms - found.writers[0].heard_ms) < 600_000
    assert [one.run for one in found.writers] == ["r"]
    assert found.writers[0].host
    assert found.id == again.id == reg.id
    assert (found.runs_read, found.runs, found.damaged) == (2, 2, ())


def test_a_verification_is_not_asked_for_again(reg, backend) -> None:
    for number in range(20):
        reg.create_run(f"r{number}").save({"a": 1}, step=1)
    with source_of(backend) as source:
        shown = VIEW.ask(source, Asked(query={"verify": ["1"]}, within_s=0.0))
    assert not shown.is_partial
    assert shown.body.report.runs == shown.body.health.runs_read == 20


def test_damage_is_named_and_hides_nothing(reg, backend) -> None:
    for name in ("bad", "good"):
        reg.create_run(name).save({"a": 1}, step=1)
    flip(backend, next(key for key in contents(backend) if key.startswith("runs/bad/log")))
    backend.put("epochs/" + "1".zfill(20), b"nonsense")
    with source_of(backend) as source:
        found = health_view(source)
        report = VIEW.ask(source, Asked(query={"verify": ["1"]})).body.report
    assert [name for name, _ in found.damaged] == ["bad"]
    assert [one.run for one in found.writers] == ["good"]
    assert found.epoch.trouble is not None
    assert {"log", "epoch"} <= {one.kind for one in report.findings}


def test_mirrors_are_behind_ahead_absent_or_diverged(reg, backend) -> None:
    other = new_backend()
    with open_on(other) as copy:
        for name in ("same", "behind", "ahead", "apart", "twin", "absent"):
            reg.create_run(name, seed=1).save({"a": 1}, step=1)
            if name != "absent":
                sync(reg, copy, [name])
        for of, step in (("behind", 2), ("apart", 2), ("twin", 2)):
            reg.run(of).save({"a": 2}, step=step)
        for of, step in (("ahead", 2), ("apart", 3), ("twin", 2)):
            copy.run(of).save({"a": 3}, step=step)
        reg.run("apart").save({"a": 4}, step=4)  # now the two logs differ in length too
    with source_of(backend) as source, source_of(other) as mirror:
        found = mirror_view(source, mirror)
        source.mirrors = (mirror,)
        page = VIEW.ask(source, Asked(query={"mirrors": ["1"]})).body
        assert [one.runs for one in page.mirrors] == [found.runs]
        assert VIEW.ask(source, Asked()).body.mirrors == ()  # read where it is asked for
    states = {one.run: one.state for one in found.runs}
    assert states == {
        "same": "same",
        "behind": "behind",
        "ahead": "ahead",
        "apart": "diverged",
        "twin": "diverged",
        "absent": "absent",
    }
    behind = next(one for one in found.runs if one.run == "behind")
    assert behind.here > behind.there


def test_a_journal_shows_what_only_this_machine_has(
    tmp_path: Path, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    journal = Journal(tmp_path / "journal")
    with source_of(backend) as source:
        assert journal_view(source, journal).waiting == ()
        with open_on(backend, journal=journal) as reg:
            reg.run("r", create=True).save({"w": np.ones(1000)}, step=3)
            ((run, one),) = journal_view(source, journal).waiting
            Carrier(reg.handle.store, RunFolder(journal, reg.id, "r"), lambda *_: None).carry()
        assert journal_view(source, journal).waiting == ()
    assert (run, one.entry.title, one.outcome) == ("r", "phase main, step 3", "waiting")
    assert one.size_bytes > 8000
