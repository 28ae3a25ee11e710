"""Runs of the preset `cobre` as policy folders, and back: the same states, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Registry, Run, formats
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput
from holdfast.registry.layouts import cobre as layout
from holdfast.registry.spec.presets import load_preset
from tests.registry.layouts.test_round_trips import names
from tests.support.commands import invoke
from tests.support.sameness import assert_same
from tests.systems import cobre as story

pytest.importorskip("flatbuffers")

#: What JSON has in another form, or not at all.
MORE = {
    "tuned": (1, [None, True, (2.5, "x")], {"inf": float("-inf"), "nan": float("nan")}),
    "counts": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "gaps": np.array([np.inf, 1e-300, -0.0, np.nan], np.float32),
    "none": np.zeros((0, 4), bool),
    "scalar": np.array(2.5, np.float16),
    "forward_passes": 2,
}


def trained(reg: Registry, name: str = "native", **config: Any) -> Run:
    run = reg.create_run(
        name, preset="cobre", seed=7, config=story.CONFIG | config, input_hash=story.SYSTEM
    )
    for step in (1, 2):
        run.save(story.straight(step).state() | MORE, step=step)
    return run


def same_files(one: Path, other: Path) -> None:
    assert names(one) == names(other)
    for name in names(one):
        if (one / name).is_symlink():
            assert (one / name).readlink() == (other / name).readlink()
            continue
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_preset_and_layout_have_one_list_of_keys() -> None:
    required = load_preset("cobre").required_keys
    assert {*required} == {"cuts", "basis", *layout.required({})}


def test_native_states_come_back_with_their_bytes(reg: Registry, tmp_path: Path) -> None:
    run = trained(reg)
    run.exchange.checkout(tmp_path / "out")
    for step in (1, 2):
        assert formats.validate(tmp_path / f"out/policy_{step:06d}") == []
    about = formats.inspect(tmp_path / "out/policy_000002").metadata
    bounds = story.straight(2)
    assert about["final_lower_bound"] == bounds.lower[-1]
    assert about["best_upper_bound"] == min(bounds.upper)
    assert (about["rng_seed"], about["max_iterations"]) == (7, story.ITERATIONS)
    assert about["system_hash"] == story.SYSTEM
    other = reg.create_run("other", preset="cobre", seed=8)
    taken = other.exchange.import_tree(tmp_path / "out")
    assert {(one.outcome, one.warnings) for one in taken} == {("imported", ())}
    for mine, theirs in zip(run.checkpoints(), other.checkpoints(), strict=True):
        assert_same(theirs.load(), mine.load())
        assert theirs.digest == mine.digest
    other.exchange.checkout(tmp_path / "again")  # of another run, and later
    same_files(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuts": [{"intercept": np.zeros(2)}]}, "not a dict of stages"),
        ({"basis": {"first": {}}}, "basis/first"),
        ({"convergence": {}}, "final_lower_bound is missing; best_upper_bound is missing"),
        ({"metadata": {"num_stages": 9}}, "num_stages is 9 in the metadata and 4 in the state"),
        ({"metadata": {"best_upper_bound": -1.0}}, "best_upper_bound is -1.0 in the metadata and"),
        ({"holdfast": 1}, "a key named holdfast"),
        ({"metadata": {"holdfast": 1}}, "holdfast is 1 in the metadata"),
        ({"rng_seed": -1}, "rng_seed has a wrong value"),
        ({"more": {1: 2}}, "no form for this value"),
        ({"more": b"x"}, "no form for this value"),
    ],
)
def test_a_state_that_no_policy_holds(
    reg: Registry, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = reg.create_run("native", preset="cobre", config=story.CONFIG)
    run.save(story.straight(1).state() | change, step=1)
    with pytest.raises(IncompatibleState, match=message):
        run.exchange.checkout(tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_a_run_without_the_configuration_says_what_is_missing(
    reg: Registry, tmp_path: Path
) -> None:
    run = reg.create_run("native", preset="cobre", config={"forward_passes": 2})
    run.save(story.straight(1).state(), step=1)
    with pytest.raises(IncompatibleState, match="max_iterations is missing"):
        run.exchange.checkout(tmp_path / "out")


@pytest.mark.parametrize(
    "marker",
    [
        7,
        {},
        {"keys": ["cuts"], "metadata": [], "forms": {}, "more": 1},
        {"keys": ["other"], "metadata": [], "forms": {}},
        {"keys": ["cuts", "basis"], "metadata": [], "forms": {}},
        {"keys": [[]], "metadata": [], "forms": {}},
        {"keys": ["convergence"], "metadata": [], "forms": []},
        {
            "keys": ["num_stages"],
            "metadata": ["other", "metadata"],
            "forms": {"num_stages": ["O", []]},
        },
        {"keys": ["num_stages"], "metadata": [], "forms": {"num_stages": ["int8", [2]]}},
        {"keys": ["num_stages"], "metadata": [], "forms": {"num_stages": ["V999999999", [1]]}},
    ],
)
def test_a_key_of_the_checkout_that_does_not_fit_is_refused(
    reg: Registry, tmp_path: Path, marker: Any
) -> None:
    trained(reg).exchange.checkout(tmp_path / "out")
    path = tmp_path / "out/policy_000001/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"holdfast": marker}))
    other = reg.create_run("other", preset="cobre")
    outcomes = {one.path: one for one in other.exchange.import_tree(tmp_path / "out")}
    refused = outcomes["policy_000001"]
    assert refused.outcome == "refused"
    why = ("does not fit", "lacks required keys", "float128 cannot be stored")
    assert any(text in refused.why for text in why)
    assert outcomes["policy_000002"].outcome == "imported"


def test_an_imported_policy_has_the_modes_and_the_hard_errors_of_its_run(
    reg: Registry, tmp_path: Path
) -> None:
    """No fork is needed: the run is created with its contract, and the policy has its own."""
    trained(reg).exchange.checkout(tmp_path / "out")
    same = {"config": story.CONFIG, "input_hash": story.SYSTEM}
    run = reg.create_run("taken", preset="cobre", seed=7, **same)
    run.exchange.import_tree(tmp_path / "out")
    with pytest.raises(Conflict, match="cannot start in mode fresh"):
        run.phases.start("fresh")
    run = reg.run("taken")
    with pytest.raises(InvalidInput, match=r"config=\.\.\., input_hash=\.\.\."):
        run.phases.start("resume", expected=story.EXPECTED)
    with pytest.raises(IncompatibleState, match="state_dimension is 3, expected 4"):
        run.phases.start("resume", expected={"state_dimension": 4, "num_stages": 4}, **same)
    found = run.phases.start("resume", expected=story.EXPECTED, **same)
    assert_same(found.state, story.straight(2).state() | MORE)
    training = story.resumed(found)
    training.iterate()
    run.save(training.state() | MORE, step=3)
    assert_same(run.latest().load(), story.straight(3).state() | MORE)

    changed = story.CONFIG | {"max_iterations": 50}
    other = reg.create_run("other", preset="cobre", config=changed, input_hash="another")
    other.exchange.import_tree(tmp_path / "out")
    other = reg.run("other", config=changed, input_hash="another")
    for resume in (other.restore, lambda: other.phases.start("resume", expected=story.EXPECTED)):
        with pytest.raises(IncompatibleState) as caught:
            resume()
        for name in ("config", "input_hash"):
            assert f"{name} of the imported file" in str(caught.value)
    warm = reg.create_run("warm", preset="cobre", config=changed, input_hash="another")
    begun = warm.phases.start("warm_start", other.latest(), expected=story.EXPECTED)
    assert_same(begun.state, {"cuts": story.straight(2).state()["cuts"]})


def test_commands_give_a_run_its_contract_and_pull_its_policy(tmp_path: Path) -> None:
    url, same = str(tmp_path / "registry"), {"config": story.CONFIG, "input_hash": story.SYSTEM}
    with holdfast.init(url) as reg:
        trained(reg).exchange.checkout(tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps(story.CONFIG))
    contract = ("--config", tmp_path / "config.json", "--input-hash", story.SYSTEM)
    for command in (
        ("run", "create", "taken", "--preset", "cobre", *contract),
        ("push", tmp_path / "out", "taken", "--layout", "cobre"),
        ("pull", "taken/latest", "--to", tmp_path / "policy", "--format", "cobre"),
    ):
        assert invoke(*command, "-r", url).exit_code == 0
    with holdfast.open(url) as reg:
        found = reg.run("taken", **same).phases.start("resume", expected=story.EXPECTED)
        assert_same(found.state, story.straight(2).state() | MORE)
    same_files(tmp_path / "policy", tmp_path / "out/policy_000002")


def test_what_the_program_writes_over_a_native_policy_is_imported(
    reg: Registry, tmp_path: Path
) -> None:
    """The program reads its own keys, and writes no others."""
    trained(reg).exchange.checkout(tmp_path / "out")
    folder = tmp_path / "out/policy_000002"
    state: Any = formats.read(folder).state
    of_checkout = ("rng_state", "convergence", "holdfast", "config_hash", "system_hash", *MORE)
    for key in set(of_checkout) - {"forward_passes"}:
        del state["metadata"][key]
    state["metadata"]["completed_iterations"] = 3
    (tmp_path / "theirs").mkdir()
    formats.write(tmp_path / "theirs/policy", state, format="cobre")
    other = reg.create_run("other", preset="cobre", seed=7, config=story.CONFIG)
    (taken,) = other.exchange.import_tree(tmp_path / "theirs")
    assert taken.outcome == "imported"
    found = other.latest()
    assert (found.step, found.load()["rng_state"]) == (3, {"rng_seed": 7})
    other.save(story.straight(4).state(), step=4)  # native again
    other.exchange.checkout(tmp_path / "back")
    same_files(tmp_path / "theirs/policy", tmp_path / "back/policy_000003")
    assert formats.validate(tmp_path / "back/policy_000004") == []
