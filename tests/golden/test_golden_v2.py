"""The golden samples of replay version 2 are read to what they were made of, and lived anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest

import holdfast
from holdfast.registry.errors import Conflict
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import Action, Commit
from holdfast.registry.history.replay import RunManifest, advance
from holdfast.registry.history.snapshots import REPLAY_VERSION
from holdfast.registry.objects.framing import split_lines
from holdfast.registry.objects.keys import slot_key, snapshot_key
from holdfast.registry.spec import RunSpec
from holdfast.registry.values import canonical
from tests.golden import make, make_later, make_v2
from tests.golden.histories import history
from tests.support.sameness import assert_same
from tests.support.stores import new_backend

V2 = Path(__file__).parent / "v2"

#: The ids of `make_v2.states()` without what the commit keeps, recorded when the samples were made.
IDS = [
    "9fa30b6625db08262e71bacd15e87a0703e3849f54fb027f6db6a86eafb1ffe6",
    "b503fda80bebcc1cf9e01cd39e1b7749110540a23c4fc85e5b55150fcdf126ff",
    "3f7eab578e9b9e3eb7e1bbbb1fc3248f431db8aca9529adb90e24d3fc081f2a2",
    "ecdef86841777dc84f2b8fc34169d9a49cdd332c049131e3130c5f1bc61b0655",
]


def sample(name: str) -> bytes:
    return (V2 / name).read_bytes()


def test_the_samples_together_have_every_action():
    slots = [*make.slots(), *make_v2.slots()]
    said = {type(action) for slot in slots for _, one in slot.commits for action in one.actions}
    later = {type(action) for action in make_later.ACTIONS}
    assert not said & later
    assert said | later == set(get_args(get_args(Action)[0]))


def test_later_fields_are_read_as_they_were_written():
    for name, commit in (
        ("owned", make_later.OWNED),
        ("planned", make_later.PLANNED),
        ("pivoted", make_later.PIVOTED),
    ):
        (line,) = split_lines((V2.parent / name).read_bytes(), where=name)
        assert line == commit.encode()
        assert Commit.decode(line, where=name) == commit


def test_later_actions_are_read_as_they_were_written():
    data = (V2.parent / "later").read_bytes()
    lines = split_lines(data, where="later")
    assert lines == make_later.lines()
    assert [Commit.decode(line, where="later").actions for line in lines] == [
        (action,) for action in make_later.ACTIONS
    ]


def test_the_log_and_its_replay():
    assert b"".join(slot.data for slot in make_v2.slots()) == sample("log")
    state = make_v2.state()
    assert [(c.n, c.tier, c.evicted, c.superseded, c.held_back) for c in state.checkpoints] == [
        (1, None, None, False, False),
        (4, "rolling", None, False, False),
        (5, "kept", None, False, False),
        (6, "rolling", "for room", True, True),
    ]
    assert state.latest().n == 5
    assert (state.phase, state.release, state.tags) == ("2", "1.0.0", {"keeper": 5})
    assert [entry.version for entry in state.roster()] == [1, 4]
    assert (state.stream("losses").count, state.stream("bandit").count) == (5, 0)
    assert state.group("evals").done == (5,)
    assert state.created.parent.run == "parent"
    end = advance(state, make_v2.slots()[-1:])
    assert (end.dropped, end.held) == ("a mistake", frozenset())


def test_the_specification():
    assert RunSpec.decode(sample("spec"), where="x") == make_v2.spec()
    assert make_v2.spec().encode() == sample("spec")


def test_the_snapshot():
    header, body = split_lines(sample("snapshot"), where="x")
    assert canonical.decode(header, where="x") == {
        "format": "holdfast.snapshot/1",
        "replay": 2,
        "slot": make_v2.state().next_slot - 1,
    }
    assert REPLAY_VERSION != 2  # see below
    assert RunManifest.decode(body, where="x") == make_v2.state()


def test_the_snapshot_of_another_replay_is_ignored():
    """Snapshots have changed since: a log is read from its first slot on."""
    backend = new_backend()
    slots = make_v2.slots()
    for slot in slots:
        backend.put(slot_key("golden", slot.number), slot.data)
    backend.put(snapshot_key("golden", slots[-2].number), sample("snapshot"))
    with open_on(backend) as reg:
        assert reg.run("golden").history.manifest() == advance(make_v2.state(), slots[-1:])
        assert [f for f in reg.verify(deep=True).findings if f.kind == "snapshot"] == []


# A whole registry


@pytest.fixture
def golden(tmp_path):
    with holdfast.open(shutil.copytree(V2 / "registry", tmp_path / "registry")) as reg:
        yield reg


def test_the_registry_is_sound(golden):
    report = golden.verify(deep=True)
    assert report.findings == ()
    assert (report.runs, golden.run_names()) == (3, ["dropped", "fork", "golden"])


def test_every_checkpoint_of_the_registry_comes_back(golden):
    run = golden.run("golden")
    records = run.manifest.checkpoints
    assert [record.manifest.hex() for record in records] == IDS
    for record, state in zip(records, make_v2.states(), strict=True):
        assert_same(run.history.checkpoint(record.n).load(), state)
    companion = golden.stored("golden/phase2/step40/companions/reference")
    assert_same(companion.load(), make_v2.reference())
    assert_same(golden.run("fork").latest().load(), make_v2.states()[3])


def test_what_the_registry_tells_of_its_runs(golden):
    run = golden.run("golden")
    assert (run.status, run.phases.current, run.manifest.spec) == (
        "completed",
        2,
        make_v2.lived_spec(),
    )
    assert [(c.step, c.tier, c.handle.newest_record().recovered) for c in run.checkpoints()] == [
        (10, None, False),
        (20, "rolling", True),
        (30, "rolling", False),
        (40, "rolling", False),
    ]
    assert golden.checkpoint("golden/gates/bc_best").step == 10
    assert run.pins.artifacts.get("seeds").load()["bank"].tolist() == list(range(50))
    assert golden.checkpoint("golden/tags/keeper").step == 40
    assert run.best(monitor=run.manifest.spec.phase("2").monitors[0]).step == 30
    assert [entry.version for entry in run.manifest.roster()] == [3]
    assert run.manifest.stream("losses").count == 6
    fork = golden.run("fork")
    assert fork.pins.gates.get("bc_best").digest.hex() == IDS[0]
    assert fork.manifest.stream("losses").count == 6
    assert golden.run("dropped").manifest.dropped == "a mistake"


def test_the_registry_can_be_continued(golden):
    fork = golden.run("fork")
    assert fork.restore().checkpoint.step == 40
    saved = fork.save(make_v2.states()[0], step=50)
    assert_same(saved.companion("reference").load(), make_v2.reference())
    with pytest.raises(Conflict, match="dropped"):
        golden.run("dropped").save(make_v2.states()[0], step=50)
    assert golden.verify(deep=True).ok


@pytest.mark.parametrize("name", ["golden", "fork", "dropped"])
def test_runs_lived_today_write_the_same_history(tmp_path, name):
    make_v2.build_registry(tmp_path / "registry")
    old, new = (history(folder / "registry", name) for folder in (V2, tmp_path))
    assert new == old
