"""Collection under each role, on the guard: the collector has what it takes, nobody else has."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.backends import open_backend
from holdfast.registry.errors import AccessDenied
from holdfast.registry.history.actions import DropRun
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.objects.keys import epoch_key, note_key, slot_key
from holdfast.registry.upkeep.gc import DAY_S, collect
from tests.terraform.judges import PREFIX, Become, Judge, Policies, World, client, keys_of_world

_KINDS = ("packs/", "manifests/", "placements/")
_STATE = {"model": {"weight": bytes(range(256)) * 400}}
_OTHER = {"model": {"weight": bytes(range(255)) * 400}}


@pytest.fixture
def thinned(become: Become) -> str:
    """A registry with something to collect: two runs of a checkpoint each, one dropped."""
    return _make_thinned(become("operator"), become)


def _make_thinned(url: str, become: Become) -> str:
    with holdfast.init(url, skip_race_probe=True):
        pass
    with holdfast.open(become("trainer")) as reg:
        reg.create_run("a").save(_STATE, step=1)
        reg.create_run("b").save(_OTHER, step=1)
        # As an older version drops: for good.
        reg.run("b").handle.committer.commit(lambda _: [DropRun(reason="a mistake")])
    return url


def _objects(world: World) -> set[str]:
    return {key for key in keys_of_world(world) if key.startswith(_KINDS)}


def test_a_collector_collects(thinned: str, become: Become, world: World) -> None:
    before = keys_of_world(world)
    with holdfast.open(become("collector")) as reg:
        report = collect(reg.handle.store, grace_s=0)
    assert (report.epoch, report.deleted.objects, report.keeps_versions) == (1, 3, False)
    assert report.noncurrent_bytes == 0
    after = keys_of_world(world)
    written = {epoch_key(1), note_key(1), slot_key("a", 2)}  # one dropped for good needs no mark
    assert set(after) - set(before) == written
    assert len(set(before) - set(after)) == 3
    with holdfast.open(become("trainer")) as reg:
        assert reg.checkpoint("a").load() == _STATE
        reg.run("a").save(_OTHER, step=2)
        assert reg.checkpoint("a").load() == _OTHER
        assert reg.verify(deep=True).ok


def test_a_trainer_hides_a_run_and_a_collector_frees_it(
    thinned: str, become: Become, world: World
) -> None:
    with holdfast.open(become("trainer")) as reg:
        before = keys_of_world(world)
        with pytest.raises(AccessDenied, match="takes the rights of a collector"):
            reg.run("a").retention.drop(reason="a mistake", now=True)
        assert keys_of_world(world) == before
        reg.run("a").retention.drop(reason="a mistake")
        with pytest.raises(AccessDenied):
            reg.drop_rules(delay_s=0)
    with holdfast.open(become("collector")) as reg:
        assert collect(reg.handle.store, grace_s=0).hidden_runs == ("a",)
        reg.drop_rules(delay_s=0)
        assert collect(reg.handle.store, grace_s=0).freed_runs == ("a",)
    assert not _objects(world)


def test_a_collector_asks_for_the_time_and_tidies_up(
    thinned: str, become: Become, world: World
) -> None:
    before = keys_of_world(world)
    with holdfast.open(become("collector")) as reg:
        report = collect(reg.handle.store, grace_s=DAY_S)
    assert (report.recent.objects, report.deleted.objects) == (3, 0)
    after = keys_of_world(world)
    assert set(after) - set(before) == {note_key(1)}, "its file under .probe/ is gone again"
    backend = open_backend(become("operator"))
    backend.put(".probe/0123456789abcdef/0000", b"x")
    backend.close()
    backend = open_backend(become("collector"))
    backend.delete(".probe/0123456789abcdef/0000")
    backend.close()
    assert keys_of_world(world) == after


@pytest.mark.parametrize("role", ["trainer", "evaluator", "annotator", "operator"])
def test_nobody_else_collects(thinned: str, become: Become, world: World, role: str) -> None:
    before = keys_of_world(world)
    with holdfast.open(become(role)) as reg, pytest.raises(AccessDenied):
        collect(reg.handle.store, grace_s=0)
    assert keys_of_world(world) == before


def test_who_may_read_may_ask_what_would_go(thinned: str, become: Become, world: World) -> None:
    before = keys_of_world(world)
    with holdfast.open(become("evaluator"), read_only=True) as reg:
        report = reg.gc(grace_s=0, dry_run=True)
    assert report.condemned.objects == 3
    assert report.keeps_versions is None, "it may not ask for the settings of the bucket"
    assert keys_of_world(world) == before


def test_what_is_collected_stays_as_a_version(thinned: str, become: Become, world: World) -> None:
    """As on the bucket of the module, where a rule of its lifecycle frees the bytes in the end."""
    owner = client(world.owner)
    owner.put_bucket_versioning(Bucket=world.bucket, VersioningConfiguration={"Status": "Enabled"})
    with holdfast.open(become("collector")) as reg:
        report = collect(reg.handle.store, grace_s=0)
    assert report.keeps_versions is True
    assert report.noncurrent_bytes == report.deleted.size_bytes > 0
    found = owner.list_object_versions(Bucket=world.bucket)["Versions"]
    stay = [version["Size"] for version in found if not version["IsLatest"]]
    assert (len(stay), sum(stay)) == (3, report.freed_bytes)


@pytest.fixture
def scattered(become: Become) -> str:
    """A registry whose run has several small packs; gives its URL."""
    with holdfast.init(become("operator"), skip_race_probe=True):
        pass
    with holdfast.open(become("trainer")) as reg:
        run = reg.create_run("a")
        for step in range(1, 5):
            run.save({"model": {"weight": bytes([step]) * 5000}}, step=step)
    return become("evaluator")


def test_a_collector_repacks(scattered: str, become: Become) -> None:
    with holdfast.open(become("annotator")) as reg, pytest.raises(AccessDenied):
        reg.repack()
    with holdfast.open(become("collector")) as reg:
        assert reg.repack().packs_written == 1
        assert collect(reg.handle.store, grace_s=0).deleted.objects > 1
        assert reg.verify(deep=True).ok


def test_a_collector_repairs(scattered: str, become: Become, world: World, tmp_path: Path) -> None:
    holdfast.init(tmp_path / "mirror").close()
    holdfast.sync(scattered, tmp_path / "mirror")
    lost = min(key for key in _objects(world) if key.startswith("packs/"))
    client(world.owner).delete_object(Bucket=world.bucket, Key=f"{PREFIX}/{lost}")
    with holdfast.open(become("annotator")) as reg, pytest.raises(AccessDenied):
        holdfast.repair(reg, tmp_path / "mirror")
    with holdfast.open(become("collector")) as reg:
        assert holdfast.repair(reg, tmp_path / "mirror").ok
        assert reg.verify(deep=True).ok


def test_a_collector_deletes_objects_and_scratch_alone(
    thinned: str, become: Become, world: World
) -> None:
    backend = open_backend(become("collector"))
    assert backend.put_if_absent(epoch_key(1), encode_sweep(1, []))
    assert not backend.put_if_absent(epoch_key(1), encode_sweep(1, []))
    objects = _objects(world)
    for key in keys_of_world(world):
        if key in objects:
            backend.delete(key)
        else:
            with pytest.raises(AccessDenied):
                backend.delete(key)
    backend.close()
    left = {key.split("/")[0] for key in keys_of_world(world)}
    assert left == {"epochs", "registry.json", "runs"}


@pytest.mark.parametrize(
    ("right", "grace_s"),
    [
        *(("List", 0.0), ("Read", 0.0), ("Condemn", 0.0), ("Commit", 0.0), ("Collect", 0.0)),
        ("Probe", DAY_S),
    ],
)
def test_a_collector_needs_every_right_that_it_has(
    guard_judge: Judge,
    policies: Policies,
    monkeypatch: pytest.MonkeyPatch,
    right: str,
    grace_s: float,
) -> None:
    """But those to repack, to put snapshots, and to ask for versions: it collects without."""
    become = _less(guard_judge, policies, monkeypatch, right)
    _make_thinned(become("operator"), become)
    with pytest.raises(AccessDenied), holdfast.open(become("collector")) as reg:
        collect(reg.handle.store, grace_s=grace_s)


def test_a_collector_that_may_not_ask_for_versions_does_not_know(
    guard_judge: Judge, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    become = _less(guard_judge, policies, monkeypatch, "Versioning")
    _make_thinned(become("operator"), become)
    with holdfast.open(become("collector")) as reg:
        report = collect(reg.handle.store, grace_s=0)
    assert (report.deleted.objects, report.keeps_versions) == (3, None)


def _less(
    guard_judge: Judge, policies: Policies, monkeypatch: pytest.MonkeyPatch, right: str
) -> Become:
    """Return what `become` is, in a world whose collector lacks a right."""
    collector = policies.roles["collector"]
    less = [statement for statement in collector["Statement"] if statement["Sid"] != right]
    assert len(less) == len(collector["Statement"]) - 1
    roles = {**policies.roles, "collector": {**collector, "Statement": less}}
    world = guard_judge.world(Policies(roles, policies.bucket))

    def become(role: str) -> str:
        world.roles[role].set_environment(monkeypatch)
        return world.url

    return become
