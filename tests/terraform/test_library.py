"""The library under each role: what it needs it has, and nothing it did can be undone by it.

On the guard (`judges`), which heeds conditions: a PUT that the library sent without `If-None-Match`
where a policy asks for it would be refused.
"""

from __future__ import annotations

import pytest

import holdfast
from holdfast.backends import open_backend
from holdfast.registry.errors import AccessDenied, NotFound
from holdfast.registry.history import log
from holdfast.registry.objects.keys import epoch_key
from holdfast.registry.store.address import Address
from holdfast.registry.upkeep.checkup import checks
from tests.terraform.judges import (
    ADMINISTRATOR,
    PLACEHOLDER,
    PREFIX,
    Apply,
    Become,
    Judge,
    Policies,
    World,
    client,
    keys_of_world,
)
from tests.terraform.operations import OPERATIONS

_STATE = {"model": {"weight": bytes(range(256)) * 400}}
_OTHER = {"model": {"weight": bytes(range(255)) * 400}}


@pytest.fixture
def trained(become: Become) -> str:
    """A registry that an operator made and a trainer saved a checkpoint into; gives its URL."""
    with holdfast.init(become("operator"), skip_race_probe=True):
        pass
    with holdfast.open(become("trainer")) as reg:
        reg.create_run("a").save(_STATE, step=1, metrics={"loss": 1.0})
    return become("evaluator")


def test_an_operator_makes_a_registry_and_doctors_it(become: Become, world: World) -> None:
    with holdfast.init(become("operator"), skip_race_probe=True):
        pass
    found = {check.name for check in checks(Address(world.url)) if check.status != "ok"}
    assert found == {"made"}  # it was told not to race the store
    assert keys_of_world(world) == ["registry.json"]
    with holdfast.open(become("operator")) as reg, pytest.raises(AccessDenied):
        reg.create_run("a")


@pytest.mark.parametrize("role", ["trainer", "evaluator", "annotator", "collector", "operator"])
def test_who_may_put_slots_can_drop_a_run(trained: str, become: Become, role: str) -> None:
    (row,) = [one for one in OPERATIONS if one.name.startswith("drop, prune")]
    with holdfast.open(become(role)) as reg:
        if row.may(role):
            reg.run("a").retention.drop(reason="because I can")
        else:
            with pytest.raises(AccessDenied):
                reg.run("a").retention.drop(reason="because I cannot")


def test_a_trainer_of_a_team_works_in_its_own_runs_alone(
    guard_judge: Judge, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = guard_judge.world(apply(bucket=PLACEHOLDER, prefix=PREFIX, teams=["vision", "speech"]))

    def become(role: str) -> str:
        world.roles[role].set_environment(monkeypatch)
        return world.url

    with holdfast.init(become("operator"), skip_race_probe=True):
        pass
    with holdfast.open(become("trainer-vision")) as reg:
        reg.create_run("vision-a").save(_STATE, step=1)
    with holdfast.open(become("trainer-speech")) as reg:
        before = keys_of_world(world)
        for act in (
            lambda: reg.run("vision-a").retention.drop(reason="a mistake"),
            lambda: reg.run("vision-a").save(_OTHER, step=2),
            lambda: reg.create_run("a"),
        ):
            with pytest.raises(AccessDenied):
                act()
        assert {key for key in keys_of_world(world) if key.startswith("runs/")} <= set(before)
        fork = reg.fork("vision-a/latest", "speech-b")
        fork.restore()
        fork.save(_OTHER, step=2)
        fork.retention.drop(reason="a mistake")
        fork.retention.undrop()


@pytest.mark.parametrize("role", ["trainer", "evaluator", "annotator", "collector"])
def test_nobody_else_makes_one(become: Become, role: str) -> None:
    with pytest.raises(AccessDenied):
        holdfast.init(become(role))
    with pytest.raises(AccessDenied):
        holdfast.init(become(role), skip_race_probe=True)


def test_a_trainer_saves_and_comes_back(
    trained: str, become: Become, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SNAPSHOT_EVERY", 1)
    with holdfast.open(become("trainer")) as reg:
        run = reg.run("a", create=True)
        restored = run.restore()
        assert restored is not None
        assert restored.state == _STATE
        with run:
            run.save(_OTHER, step=2).report({"loss": 0.5})
            run.pins.tags.set("shipped", run.save_async(_STATE, step=3).wait())
        assert run.status == "completed"
        assert reg.verify(deep=True).ok
    kinds = {key.split("/")[2] for key in keys_of_world(world) if key.startswith("runs/")}
    assert kinds == {"log", "snapshots"}


def test_a_trainer_mends_what_is_damaged(trained: str, become: Become, world: World) -> None:
    (pack,) = (key for key in keys_of_world(world) if key.startswith("packs/"))
    client(world.owner).put_object(Bucket=world.bucket, Key=f"team/{pack}", Body=b"damaged")
    with holdfast.open(become("trainer")) as reg:
        assert not reg.verify(deep=True).ok
        reg.create_run("b").save(_STATE, step=1)
        assert reg.verify(deep=True).ok


def test_a_trainer_mirrors_a_registry(
    trained: str, become: Become, world: World, tmp_path: object
) -> None:
    with holdfast.init(f"{tmp_path}/local") as local:
        local.create_run("b").save(_OTHER, step=1)
    holdfast.sync(f"{tmp_path}/local", become("trainer"))
    with holdfast.open(become("evaluator")) as reg:
        assert reg.run_names() == ["a", "b"]


@pytest.mark.parametrize("role", ["trainer", "evaluator", "annotator", "operator"])
def test_nothing_can_be_deleted(trained: str, become: Become, world: World, role: str) -> None:
    keys = keys_of_world(world)
    assert len({key.split("/")[0] for key in keys}) == 5
    backend = open_backend(become(role))
    for key in keys:
        with pytest.raises(AccessDenied):
            backend.delete(key)
    assert [info.key for info in backend.list()] == keys
    backend.close()


def test_history_stays_whoever_asks(trained: str, become: Become, world: World) -> None:
    keys = [key for key in keys_of_world(world) if key.startswith(("runs/", "registry.json"))]
    backend = open_backend(become(ADMINISTRATOR))
    for key in keys:
        with pytest.raises(AccessDenied):
            backend.delete(key)
    backend.close()


def test_history_is_not_rewritten_whoever_asks(
    guard_judge: Judge, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = guard_judge.world(policies)
    for role in ("trainer", "collector", "operator", ADMINISTRATOR):
        world.roles[role].set_environment(monkeypatch)
        backend = open_backend(world.url)
        for key in ("runs/a/log/00000000000000000000", epoch_key(1), "registry.json"):
            with pytest.raises(AccessDenied):
                backend.put(key, b"other")
        backend.close()


def test_an_evaluator_reads_and_writes_nothing(trained: str, become: Become) -> None:
    with holdfast.open(become("evaluator")) as reg:
        checkpoint = reg.checkpoint("a/latest")
        assert checkpoint.load() == _STATE
        assert reg.verify(deep=True).ok
        restored = reg.run("a").restore()
        assert restored is not None
        assert not restored.report
        with pytest.raises(NotFound):
            reg.run("b")
        for write in (
            lambda: reg.run("a").save(_OTHER, step=2),
            lambda: reg.create_run("b"),
            lambda: checkpoint.report({"accuracy": 1.0}),
            lambda: reg.run("a").pins.tags.set("mine", checkpoint),
        ):
            with pytest.raises(AccessDenied):
                write()
    with holdfast.open(become("evaluator"), read_only=True) as reg:
        assert reg.checkpoint("a/latest").metrics == {"loss": 1.0}


def test_an_annotator_reports_and_tags_and_saves_nothing(
    trained: str, become: Become, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "SNAPSHOT_EVERY", 1)
    with holdfast.open(become("annotator")) as reg:
        checkpoint = reg.checkpoint("a/latest")
        assert checkpoint.load() == _STATE
        checkpoint.report({"accuracy": 1.0})
        reg.run("a").pins.tags.set("best-so-far", checkpoint)
        with pytest.raises(AccessDenied):
            reg.run("a").save(_OTHER, step=2)
    with holdfast.open(become("evaluator")) as reg:
        found = reg.checkpoint("a/tags/best-so-far")
        assert found.metrics == {"loss": 1.0, "accuracy": 1.0}
    assert any("/snapshots/" in key for key in keys_of_world(world))


@pytest.mark.parametrize("right", ["List", "Read", "Commit", "Store", "Announce"])
def test_a_trainer_needs_every_right_that_it_has(
    guard_judge: Judge, policies: Policies, monkeypatch: pytest.MonkeyPatch, right: str
) -> None:
    """All but those to put snapshots, a cache, and signatures: a save goes through without."""
    trainer = policies.roles["trainer"]
    assert [s["Sid"] for s in trainer["Statement"]] == [
        "List",
        "Read",
        "Commit",
        "Store",
        "Snapshot",
        "Announce",
        "Sign",
    ]
    less = [statement for statement in trainer["Statement"] if statement["Sid"] != right]
    roles = {**policies.roles, "trainer": {**trainer, "Statement": less}}
    world = guard_judge.world(Policies(roles, policies.bucket))
    world.roles["operator"].set_environment(monkeypatch)
    with holdfast.init(world.url, skip_race_probe=True):
        pass
    world.roles["trainer"].set_environment(monkeypatch)
    if right == "Announce":  # it is needed behind a seal
        with holdfast.open(world.url) as reg:
            reg.create_run("a").save(_STATE, step=1)
        world.roles["collector"].set_environment(monkeypatch)
        with holdfast.open(world.url) as reg:
            reg.upgrade()
            reg.gc(grace_s=0)
        world.roles["trainer"].set_environment(monkeypatch)
    with pytest.raises(AccessDenied), holdfast.open(world.url) as reg:
        reg.run("a", create=True).save(_OTHER, step=2)


def test_without_the_right_to_list_what_is_absent_looks_forbidden(
    guard_judge: Judge, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = policies.roles["evaluator"]
    world = guard_judge.world(policies)
    world.roles["evaluator"].set_environment(monkeypatch)
    with pytest.raises(NotFound, match="not a registry"):
        holdfast.open(world.url)
    roles = {"evaluator": {**evaluator, "Statement": evaluator["Statement"][1:]}}
    world = guard_judge.world(Policies(roles, policies.bucket))
    world.roles["evaluator"].set_environment(monkeypatch)
    with pytest.raises(AccessDenied):
        holdfast.open(world.url)
