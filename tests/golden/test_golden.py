"""The golden samples are read to what they were made of, and ids have not changed since."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.errors import Malformed
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import CondemnedShard, EpochHeader
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.history.snapshots import REPLAY_VERSION
from holdfast.registry.objects.framing import split_lines, unwrap_frame
from holdfast.registry.objects.keys import ObjectKey, slot_key, snapshot_key
from holdfast.registry.objects.manifest import Manifest
from holdfast.registry.objects.pack import open_pack
from holdfast.registry.objects.placement import Placement
from holdfast.registry.store.fetching import verify_pack_chunks
from holdfast.registry.store.store import RegistryConfig
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.golden import make
from tests.golden.histories import history
from tests.support.sameness import assert_same
from tests.support.stores import new_backend

V1 = Path(__file__).parent / "v1"
NAMES = dict(line.split() for line in (V1 / "names.txt").read_text().splitlines())

#: The ids of `make.states()`, recorded when the samples were made.
IDS = [
    "c8ae6e2f10cf4d97fdc1f9c6cddbdc9f96556bdc1251c5dc8bc915c58937660b",
    "ba6c9540da250e94f28b6532203222822f231d7009e1e97b067bb512dc761fc3",
    "faa2ab4e4667c53318d97d16462589910ab879d9944a29353b9fbf4234ceec69",
]


def sample(name: str) -> bytes:
    return (V1 / name).read_bytes()


def named(name: str) -> Digest:
    return Digest.parse(NAMES[name])


def test_the_manifest():
    read = Manifest.decode(sample("manifest"), named("manifest"), where="x")
    assert read == make.manifest()
    assert make.manifest().digest == named("manifest")
    content = unwrap_frame(sample("manifest"), where="x")
    assert unwrap_frame(make.manifest().encode(), where="x") == content


def test_the_pack():
    data = sample("pack")
    table = open_pack(data, named("pack"), where="x")
    verify_pack_chunks(data, table, ObjectKey("packs", named("pack"), 0))
    chunks = [data[e.offset : e.offset + e.stored_bytes] for e in table]
    assert tuple(chunks) == make.CHUNKS
    assert make.pack() == (named("pack"), data)


def test_the_placement():
    read = Placement.decode(sample("placement"), named("placement"), where="x")
    assert read == make.placement()
    assert make.placement().digest == named("placement")


@pytest.mark.parametrize(
    ("name", "number"), [("slot_commit_place", 1), ("slot_mark", 2), ("slot_many", 3)]
)
def test_the_slots(name, number):
    assert Slot.decode(number, sample(name), where="x") == make.slots()[number]
    assert make.slots()[number].data == sample(name)


def test_the_log_and_its_replay():
    assert b"".join(slot.data for slot in make.slots()) == sample("log")
    state = advance(RunManifest(run_id="golden"), make.slots())
    assert state.head == named("head")
    assert (state.status, state.epoch, state.tags) == ("completed", 3, {"keeper": 1})
    assert [(c.n, c.step, c.superseded) for c in state.checkpoints] == [
        (1, 10, False),
        (2, 2**53, True),
        (3, 11, False),
    ]
    assert state.latest().metrics == {"loss": -0.0, "mu": 27.1}
    assert state.best(state.monitors[0]).n == 3


def test_the_snapshot_of_another_replay_is_ignored():
    """Replay has changed since: a log is read from its first slot on, and nobody is alarmed."""
    header, body = split_lines(sample("snapshot"), where="x")
    assert canonical.decode(header, where="x")["replay"] == 1 != REPLAY_VERSION
    with pytest.raises(Malformed):  # what it holds is no run manifest of today
        RunManifest.decode(body, where="x")
    backend = new_backend()
    for slot in make.slots():
        backend.put(slot_key("golden", slot.number), slot.data)
    backend.put(snapshot_key("golden", 4), sample("snapshot"))
    with open_on(backend) as reg:
        assert reg.run("golden").history.manifest() == make.state()
        assert [f for f in reg.verify(deep=True).findings if f.kind == "snapshot"] == []


def test_the_sweep():
    first, *rest = split_lines(sample("epoch_sweep"), where="x")
    assert EpochHeader.decode(first, where="x") == EpochHeader(epoch=1, entry="sweep")
    shards = [CondemnedShard.decode(line, where="x") for line in rest]
    keys = {ObjectKey.parse(key) for shard in shards for key in shard.keys}
    assert keys == set(make.condemned())


def test_the_upgrade():
    (line,) = split_lines(sample("epoch_upgrade"), where="x")
    assert EpochHeader.decode(line, where="x") == EpochHeader(
        epoch=2, entry="upgrade", min_writer=1
    )


def test_the_config():
    (line,) = split_lines(sample("registry.json"), where="x")
    assert RegistryConfig.decode(line, where="x") == make.config()


# A whole registry


@pytest.fixture
def golden(tmp_path):
    with holdfast.open(shutil.copytree(V1 / "registry", tmp_path / "registry")) as reg:
        yield reg


def test_the_registry_is_sound(golden):
    report = golden.verify(deep=True)
    assert report.findings == ()
    assert (report.runs, report.checkpoints) == (1, 3)
    assert golden.id == "1".zfill(32)


def test_every_checkpoint_of_the_registry_comes_back(golden):
    records = golden.run("golden").manifest.checkpoints
    assert [record.manifest.hex() for record in records] == IDS
    for identity, state in zip(IDS, make.states(), strict=True):
        assert_same(golden.checkpoint(f"golden/{identity}").load(), state)


def test_what_the_registry_tells_of_its_run(golden):
    run = golden.run("golden")
    assert (run.status, run.config) == ("completed", {"lr": 1e-3})
    assert [(c.phase, c.step, c.digest.hex()) for c in run.checkpoints()] == [
        (1, 10, IDS[0]),
        (1, 20, IDS[2]),
    ]
    assert run.best().digest.hex() == IDS[0]
    assert golden.checkpoint("golden/tags/keeper").meta == {"epoch": 1}
    assert golden.checkpoint(f"golden/{IDS[1]}").superseded
    metrics = run.latest().metrics
    assert (metrics["loss"], metrics["mu"], math.isnan(metrics["bad"])) == (3.0, 27.1, True)
    commits = list(run.history.commits())
    assert {commit.author for commit in commits} == {"trainer@host"}


def test_the_registry_can_be_continued(golden):
    run = golden.run("golden")
    run.status = "running"
    run.save(make.states()[1], step=30, phase=1)
    assert run.latest().digest.hex() == IDS[1]
    assert golden.verify(deep=True).ok


def test_ids_computed_today_equal_the_recorded_ones():
    with open_on(new_backend()) as reg:
        run = reg.create_run("other")
        made = [run.save(state, step=i).digest.hex() for i, state in enumerate(make.states())]
    assert made == IDS


def test_a_run_lived_today_writes_the_same_history(tmp_path):
    make.build_registry(tmp_path / "registry")
    old, new = (history(folder / "registry", "golden") for folder in (V1, tmp_path))
    assert new == old
