"""Demands of the documents, each by a run of its own that shows it and nothing else.

`docs/systems.md` names the row of each test, and `mutants.py` the change to the library that makes
the test fail.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Checkpoint, Registry, Retention, Run, formats
from holdfast.backends import open_backend
from holdfast.backends.wrappers import Metered
from holdfast.formats import thalia as brains
from holdfast.registry.comparing.state_diff import diff
from holdfast.registry.errors import (
    IncompatibleState,
    IntegrityError,
    InvalidInput,
    NotFound,
    UnsupportedValue,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.layouts import ImportedFile
from holdfast.registry.pytree.torch_memory import copy_of
from holdfast.registry.spec.presets import load_preset
from tests.support.sameness import assert_same
from tests.systems.adr004 import CARD
from tests.systems.test_to_the_letter import Student, adr004_run, adr004_state, hydra_state


@pytest.fixture
def reg(tmp_path: Path) -> Iterator[Registry]:
    """An empty registry in a folder."""
    with holdfast.init(tmp_path / "registry") as made:
        yield made


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(one): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def links(folder: Path) -> dict[str, str]:
    """Return the target of every link below a folder."""
    found = (one for one in folder.rglob("*") if one.is_symlink())
    return {str(one.relative_to(folder)): str(one.readlink()) for one in found}


# Hydra


def cloning(reg: Registry) -> Run:
    """Return a run that is in phase 1."""
    return reg.create_run(preset="hydra", seed=7)


def clone(run: Run, number: int, loss: float, **more: Any) -> Checkpoint:
    """Save the checkpoint of this number of phase 1."""
    state = {**hydra_state(1, 10_000 * number, Student()), "metrics": {"heldout_ce": loss}, **more}
    return run.save(state, step=10_000 * number)


def distilling(reg: Registry, enable: tuple[str, ...] = ()) -> tuple[Run, Any]:
    """Return a run that has entered phase 2, and the result of the transition."""
    run = cloning(reg)
    clone(run, 1, 2.0)
    run.pins.gates.set("bc_best")
    return run, run.phases.transition(2, targets={"model_record": Student()}, enable=enable)


def test_latest_is_the_newest_save_whose_weights_are_finite(reg: Registry) -> None:
    run = cloning(reg)
    for number in (1, 2, 3):
        saved = clone(run, number, 4.0 - number)
        assert reg.checkpoint(f"{run.id}/phase1/latest").digest == saved.digest
    broken = Student()
    broken.stem.weight.data[0] = float("nan")
    clone(run, 4, 0.5, model_record=broken.state_dict())
    assert reg.checkpoint(f"{run.id}/phase1/latest").digest == saved.digest
    assert run.latest(1).step == 30_000


def test_links_move_with_each_save(reg: Registry, tmp_path: Path) -> None:
    run = cloning(reg)
    folder = "phase1/checkpoints"
    best = 0
    for number, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
        clone(run, number, loss)
        best = 3 - 1 if number == 3 else number
        run.exchange.checkout(tmp_path / "tree", layout="hydra")
        name = "ckpt_phase1_step{:08d}.pt"
        assert links(tmp_path / "tree") == {
            f"{folder}/latest.pt": name.format(10_000 * number),
            f"{folder}/best.pt": name.format(10_000 * best),
        }


def test_evaluations_have_a_folder_of_their_own(reg: Registry, tmp_path: Path) -> None:
    run = cloning(reg)
    run.pins.artifacts.set("eval_seeds", {"bank": torch.arange(1000)})
    run.pins.artifacts.set("grp", {"grp": torch.ones(3)})
    run.streams["eval"].append([{"step": 1, "points": 1.5}])
    run.streams["eval"].append([{"step": 2, "points": -3.25}])
    with pytest.raises(InvalidInput, match="kept for ever"):
        run.streams["eval"].archive("over")
    run.exchange.checkout(tmp_path / "tree", layout="hydra")
    tree = tmp_path / "tree" / "eval"
    names = {str(one.relative_to(tree)) for one in tree.rglob("*") if one.suffix != ".sha256"}
    assert names == {"eval_seeds.pt", "eval.jsonl"}
    assert (tmp_path / "tree" / "grp" / "grp.pt").exists()
    other = cloning(reg)
    reports = {
        one.path: one.outcome
        for one in other.exchange.import_tree(tmp_path / "tree", layout="hydra")
    }
    assert set(reports.values()) == {"imported"}
    assert_same(other.pins.artifacts.get("eval_seeds").load(), {"bank": torch.arange(1000)})
    assert [one["points"] for one in other.streams["eval"].read()] == [1.5, -3.25]
    for written in ("step,points\n", "step,points\n1,1.5\n", "step,points\n1,1.5\n2,-3.25\n"):
        (tree / "arena.csv").write_text(written)  # a program appends to it
        grown = [outcomes_of(other, tmp_path / "tree", "eval/arena.csv") for _ in range(2)]
        assert [one.outcome for one in grown] == ["imported", "there already"]
        assert grown[0].ref == grown[1].ref
    other.exchange.checkout(tmp_path / "again", layout="hydra")
    assert (tmp_path / "again/eval/arena.csv").read_text() == written
    before = "step,points\n1,1.5\n"
    kept = other.pins.artifacts.get("eval.arena.csv.2").load()
    assert kept["file"]["bytes"].tobytes() == before.encode()
    (tree / "arena.csv").write_text(before)
    refused = outcomes_of(other, tmp_path / "tree", "eval/arena.csv")
    assert (refused.outcome, "another name" in refused.why) == ("refused", True)


def outcomes_of(run: Run, tree: Path, path: str) -> ImportedFile:
    (found,) = [one for one in run.exchange.import_tree(tree, layout="hydra") if one.path == path]
    return found


def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_written(
    reg: Registry, tmp_path: Path
) -> None:
    run = cloning(reg)
    clone(run, 1, 2.0)
    before = files(tmp_path / "registry")
    for name, worse in (("hook", print), ("of", iter([1])), ("lock", object())):
        with pytest.raises(UnsupportedValue, match=rf"state\['optimizer_record'\]\['{name}'\]"):
            clone(run, 2, 1.0, optimizer_record={"exp_avg": torch.zeros(9_000), name: worse})
        assert files(tmp_path / "registry") == before


def test_a_changed_byte_of_any_file_of_a_save_is_noticed(reg: Registry, tmp_path: Path) -> None:
    run = cloning(reg)
    saved = clone(run, 1, 2.0, optimizer_record={"exp_avg": torch.arange(9_000.0)})
    chance = random.Random(3)
    for kind in ("packs", "manifests", "placements", f"runs/{run.id}/log"):
        found = [one for one in (tmp_path / "registry" / kind).rglob("*") if one.is_file()]
        assert found, kind
        for path in found:
            data = path.read_bytes()
            for at in (0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(3))):
                path.chmod(0o644)
                path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
                assert not verified(tmp_path / "registry"), f"{path}: byte {at}"
            path.write_bytes(data)
    assert verified(tmp_path / "registry")
    assert_same(saved.load(only="model_record"), saved.load(only="model_record"))


def verified(folder: Path) -> bool:
    """Return whether a new process finds a registry whole."""
    with holdfast.open(folder, read_only=True, remember=False) as reg:
        try:
            return reg.verify(deep=True).ok
        except IntegrityError:
            return False


def test_the_tracker_of_the_best_begins_again_in_each_phase(reg: Registry) -> None:
    run, begun = distilling(reg)
    first = run.best(phase=1)
    assert first is not None
    assert run.best(phase=2) is None
    assert run.best() is None  # of the phase that training is in
    teacher = {**begun.state["teacher_state_dict"], "mask_opp": torch.zeros(3).bfloat16()}
    teacher["mask_wall"] = torch.zeros(3).bfloat16()
    for step, mu in ((10_500, 90.0), (11_000, 80.0)):
        state = hydra_state(2, step, Student(), teacher_state_dict=teacher)
        run.save({**state, "metrics": {"mu": mu, "sigma": 1.0}}, step=step, phase=2)
    assert run.best().step == 10_500
    run.pins.gates.set("distill_best")
    run.phases.transition(3, targets={"model_record": Student()})
    assert run.best() is None  # the same monitor, and none of its values of phase 2
    state = hydra_state(3, 11_500, Student(), opponent_pool_metadata={"next": 1})
    run.save({**state, "metrics": {"mu": 20.0, "sigma": 1.0}}, step=11_500, phase=3)
    assert run.best().step == 11_500
    assert (run.best(phase=1), run.best(phase=2).step) == (first, 10_500)


def test_twenty_checkpoints_take_no_more_than_twenty_files(reg: Registry, tmp_path: Path) -> None:
    run = cloning(reg)
    torch.manual_seed(0)
    file = tmp_path / "state.pt"
    for number in range(1, 26):
        state = {"exp_avg": torch.randn(50_000), "kept": torch.ones(10_000)}
        clone(run, number, 9.0 - number / 9, optimizer_record=state)
        torch.save({**hydra_state(1, 1, Student()), "optimizer_record": state}, file)
    reg.gc(grace_s=0)
    assert len(run.checkpoints(1)) == 20
    kept = sum(len(data) for data in files(tmp_path / "registry").values())
    assert kept <= 20 * file.stat().st_size


def test_the_teacher_shares_nothing_with_the_student_and_is_cast(reg: Registry) -> None:
    spec = load_preset("hydra").changed(dtypes=())
    run, wide = reg.create_run(preset=spec, seed=7), Student().float()
    run.save({**hydra_state(1, 10_000, wide), "metrics": {"heldout_ce": 1.0}}, step=10_000)
    run.pins.gates.set("bc_best")
    state = run.phases.transition(2, targets={"model_record": wide}).state
    student, teacher = state["model_record"], state["teacher_state_dict"]
    assert {one.dtype for one in student.values()} == {torch.float32}
    assert {one.dtype for one in teacher.values()} == {torch.bfloat16}
    alike, _ = distilling(reg, ())[1], None
    for begun in (state, alike.state):
        for name, copied in begun["teacher_state_dict"].items():
            before = begun["model_record"][name].clone()
            copied.fill_(7.0)
            assert torch.equal(begun["model_record"][name], before)
            assert not copied.requires_grad


def test_strict_loading_compares_both_ways_and_dtypes(reg: Registry) -> None:
    run = cloning(reg)
    clone(run, 1, 2.0)
    run.pins.gates.set("bc_best")
    more, fewer = Student(), Student()
    more.extra = torch.nn.Linear(2, 2).bfloat16()
    del fewer.value_head
    before = run.refresh().manifest
    for target, message in (
        (more, "extra.weight is not in the source"),
        (fewer, "value_head.weight is not in the target"),
        (Student().float(), r"stem.weight is bfloat16\[4, 3\], target float32\[4, 3\]"),
        (Student(planes=5), r"stem.weight is bfloat16\[4, 3\], target bfloat16\[4, 5\]"),
    ):
        with pytest.raises(IncompatibleState, match=message):
            run.phases.transition(2, targets={"model_record": target})
        assert run.refresh().manifest == before


def test_of_equal_values_the_first_stays_best(reg: Registry) -> None:
    run = cloning(reg)
    for number, loss in ((1, 3.0), (2, 2.0), (3, 2.0), (4, 2.5), (5, 2.0)):
        clone(run, number, loss)
        assert run.best(phase=1).step == 10_000 * min(number, 2)
    assert reg.run(run.id).best(phase=1).step == 20_000
    assert reg.checkpoint(f"{run.id}/phase1/best").step == 20_000


# ADR-004


def test_folders_that_are_not_there_are_made(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "some" / "where" / "registry") as reg:
        run = adr004_run(reg)
        run.releases.publish("1.0.0", run.best(), card=CARD)
        run.exchange.checkout(tmp_path / "any" / "where" / "checkpoints", layout="adr004")
    tree = tmp_path / "any" / "where" / "checkpoints"
    made = {str(one.relative_to(tree)) for one in tree.rglob("*") if one.is_dir()}
    wanted = {"training", "milestones", "production", "metadata", "metadata/model_cards"}
    assert {one for one in made if not one.startswith(".")} == wanted


def test_what_is_not_found_is_answered_with_near_names(reg: Registry) -> None:
    run = adr004_run(reg)
    run.pins.tags.set("reviewed", run.best())
    for ref, near in (
        ("bayesain/latest", "'bayesian'"),
        ("bayesian/tags/reviewd", "'reviewed'"),
        ("bayesian/best/acuracy", "'accuracy'"),
        ("bayesian/main/step00000009", "steps 6, 7, 8"),
    ):
        with pytest.raises(NotFound) as caught:
            reg.checkpoint(ref)
        assert near in str(caught.value), ref


def test_days_decide_of_checkpoints_and_never_of_releases(
    reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reg.create_run("bayesian", preset="adr004")
    for epoch, accuracy in ((1, 0.5), (2, 0.9)):
        run.save(adr004_state(epoch, accuracy, 1 - accuracy), step=epoch)
    release = run.releases.publish("1.0.0", run.checkpoints()[0], card=CARD)
    weights = release.load()["model_state_dict"]
    policy = Retention(for_days=30)
    assert not run.retention.prune(policy, dry_run=True).evicted
    day_s, now = 86_400, time.time()
    for days, gone in ((29, 0), (31, 1)):
        monkeypatch.setattr("time.time", lambda days=days: now + days * day_s)
        assert len(run.retention.prune(policy, dry_run=True).evicted) == gone
    run.retention.prune(policy)
    reg.gc(grace_s=0)
    assert [one.step for one in run.checkpoints()] == [2]  # the newest stays in any case
    assert_same(run.releases.get("1.0.0").load()["model_state_dict"], weights)


def test_one_documented_object_saves_and_loads_everything(reg: Registry) -> None:
    run = reg.create_run("bayesian", preset="adr004")
    for kind in (Run, Checkpoint):
        for name in dir(kind):
            if not name.startswith("_"):
                assert (getattr(kind, name).__doc__ or "").strip(), f"{kind.__name__}.{name}"
    state = adr004_state(1, 0.5, 2.0)
    saved = run.save(state, step=1, streams={"training_history": [{"step": 1, "loss": 2.0}]})
    release = run.releases.publish("1.0.0", saved, card=CARD)
    again = reg.run("bayesian")
    for found in (again.latest(), again.best(), again.restore().checkpoint):
        assert_same(found.load(), state)
    assert_same(again.releases.get("1.0.0").load(), release.load())
    assert list(again.streams["training_history"].read()) == [{"step": 1, "loss": 2.0}]


# ANDREA


def andrea_state(step: int, count: int = 7) -> dict[str, Any]:
    """Return the regions of a step file, each with numbers of its own."""
    arrays = {name: np.arange(count, dtype=np.float32) + n for n, name in enumerate("wmv", step)}
    return {"step": step, "weights": arrays["w"], "m": arrays["m"], "v": arrays["v"]}


def test_every_claim_is_traced_to_an_entry_and_the_commit_that_wrote_it(
    reg: Registry, tmp_path: Path
) -> None:
    run = reg.create_run("andrea", preset="andrea")
    for step in (100, 200):
        entries = [{"step": one, "loss": 9.0 - one / 100} for one in range(step - 99, step + 1)]
        run.save(andrea_state(step), step=step, streams={"loss": entries})
    for label in ("polish", "pivot"):
        with pytest.raises(InvalidInput, match="kept for ever"):
            run.streams["loss"].archive(label)
    claimed = list(reg.run("andrea").streams["loss"].read())[149]
    assert claimed == {"step": 150, "loss": 7.5}
    assert run.streams["loss"].count == 200
    writers = {one.n: one.author for one in run.history.commits()}
    assert writers[run.latest().handle.n] == writers[run.checkpoints()[0].handle.n]
    assert verified(tmp_path / "registry")


def test_a_step_file_has_8_bytes_and_12_for_each_parameter(reg: Registry, tmp_path: Path) -> None:
    run = reg.create_run("andrea", preset="andrea")
    for step, count in ((100, 7), (200, 7)):
        run.save(andrea_state(step, count), step=step)
    run.exchange.checkout(tmp_path / "tree", layout="andrea")
    for step in (100, 200):
        data = (tmp_path / "tree" / f"step_{step:06d}.bin").read_bytes()
        assert len(data) == 8 + 12 * 7
        assert struct.unpack("<ii", data[:8]) == (step, 7)
        state = andrea_state(step)
        arrays = np.frombuffer(data, "<f4", offset=8).reshape(3, 7)
        for array, name in zip(arrays, ("weights", "m", "v"), strict=True):
            assert np.array_equal(array, state[name])


# Cobre


def test_each_policy_of_a_run_has_a_folder_that_comes_back(reg: Registry, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    from tests.registry.formats.test_cobre import METADATA, policy

    run = reg.create_run("own", preset="cobre", seed=1)
    states = {}
    for step in (5, 6):
        states[step] = policy()
        states[step]["metadata"] = {**METADATA, "completed_iterations": step}
        needed = {
            "completed_iterations": step,
            "rng_state": {"rng_seed": METADATA["rng_seed"]},
            "convergence": {"final_lower_bound": 10.5, "best_upper_bound": None},
            "state_dimension": 3,
            "num_stages": 2,
        }
        run.save({**states[step], **needed}, step=step)
    out = tmp_path / "out"
    run.exchange.checkout(out, layout="cobre")
    assert links(out) == {"latest": "policy_000006"}
    for step, state in states.items():
        formats.write(tmp_path / f"direct{step}", state, format="cobre")
        ours = tmp_path / f"direct{step}"
        theirs = out / f"policy_{step:06d}"
        here = {Path(name).relative_to(ours): data for name, data in files(ours).items()}
        assert here == {Path(name).relative_to(theirs): d for name, d in files(theirs).items()}
    other = reg.create_run("other", preset="cobre", seed=2)
    assert {one.outcome for one in other.exchange.import_tree(out, layout="cobre")} == {"imported"}
    for found in other.checkpoints():
        assert_same({name: found.load()[name] for name in states[5]}, states[found.step])
    assert sorted(found.step for found in other.checkpoints()) == [5, 6]


# Thalia


def brain(grown: int = 0) -> dict[str, Any]:
    """Return a brain of two regions, of which one may have grown."""
    chance = torch.Generator().manual_seed(5)
    return {
        "regions": {
            name: {
                "weights": {"feedforward": torch.randn(rows + grown, 6, generator=chance)},
                "neuron_state": {"membrane": torch.randn(rows + grown, generator=chance)},
            }
            for name, rows in (("cortex_l4", 40), ("striatum", 8))
        },
        "pathways": {},
        "config": {"dt": 1.0},
        "theta": {"phase": 0.25},
        "training_steps": 100,
    }


def test_a_comparison_says_what_was_added_grown_and_changed(reg: Registry) -> None:
    run = reg.create_run("brain", preset="thalia")
    before = brain()
    after = brain()
    after["regions"]["hippocampus"] = {"weights": {"feedforward": torch.ones(3, 3)}}
    weights = after["regions"]["striatum"]["weights"]
    weights["feedforward"] = torch.cat([weights["feedforward"], torch.ones(2, 6)])
    after["regions"]["cortex_l4"]["neuron_state"]["membrane"] += 1
    after["theta"] = {"phase": 0.5}
    saved = [run.save(one, step=n, phase="s") for n, one in enumerate((before, after))]
    found = diff(*saved)
    shapes = {one.path: (one.before, one.after) for one in found.differing}
    assert {one.path: one.kind for one in found.differing} == {
        "regions/hippocampus/weights/feedforward": "added",
        "regions/striatum/weights/feedforward": "reshaped",
        "regions/cortex_l4/neuron_state/membrane": "changed",
    }
    grown = shapes["regions/striatum/weights/feedforward"]
    assert [one.shape for one in grown] == [(8, 6), (10, 6)]
    assert [one.path for one in found.values] == ["theta/phase"]
    assert diff(saved[0], saved[0]).is_same


def test_every_stage_of_a_chain_comes_back_with_every_bit(tmp_path: Path) -> None:
    stages = [brain()]
    for number in (1, 2, 3):
        now = brain(grown=2 if number > 1 else 0)
        now["regions"]["striatum"]["weights"]["feedforward"][number] += 1 / 3
        now["regions"]["cortex_l4"]["neuron_state"]["membrane"] *= 1.1
        now["theta"] = {"phase": 0.25 * number}
        now["training_steps"] = 100 * (number + 1)
        now["config"] = {"dt": 1.0, "stage": number}
        stages.append(now)
    paths = [tmp_path / "stage0.thalia"]
    brains.save(paths[0], stages[0])
    for number in (1, 2, 3):
        paths.append(tmp_path / f"stage{number}.delta.thalia")
        brains.save_delta(paths[number], stages[number], paths[number - 1], threshold=0)
    for number, (path, state) in enumerate(zip(paths, stages, strict=True)):
        brains.save(tmp_path / f"whole{number}.thalia", state)
        found = brains.load(path).state
        whole = brains.load(tmp_path / f"whole{number}.thalia").state
        for name, region in whole["regions"].items():
            given = {key: one for key, one in found["regions"][name].items() if one is not None}
            assert_same(given, region)
        assert_same({name: found[name] for name in ("config", "theta")},
                    {name: state[name] for name in ("config", "theta")})  # fmt: skip
        assert formats.validate(path) == []


def test_the_end_of_a_stage_is_saved_without_a_call(reg: Registry) -> None:
    run = reg.create_run("brain", preset="thalia")
    step, leaves_itself = 0, holdfast.Stopping(exits=False)
    for stage in ("sensorimotor", "phonology"):
        with run.checkpointer(every_steps=1000, phase=stage, stopping=leaves_itself) as curriculum:
            for _ in range(7):
                step += 1
                curriculum.step(step, {**brain(), "training_steps": step})
    assert [(one.handle.record.phase, one.step) for one in run.checkpoints()] == [
        ("sensorimotor", 7),
        ("phonology", 14),
    ]
    assert run.latest(phase="sensorimotor").load()["training_steps"] == 7


def test_regions_that_are_not_asked_for_are_read_at_their_first_access(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "registry") as made:
        state = brain()
        state["regions"]["large"] = {"weights": {"feedforward": torch.randn(500, 500)}}
        made.create_run("brain", preset="thalia").save(state, step=1, phase="s")
    meter = Metered(open_backend(str(tmp_path / "registry")))
    with open_on(meter) as reg:
        regions = reg.run("brain").latest().lazily("regions")
        assert_same(regions["striatum"], state["regions"]["striatum"])
        before = meter.snapshot().read_bytes
        assert before < 500_000
        assert_same(regions["large"], state["regions"]["large"])
        assert meter.snapshot().read_bytes - before >= 1_000_000


class OnDevice(torch.Tensor):
    """A tensor that is on a GPU, as far as anybody can tell who does not copy it to the host."""

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, dtype=real.dtype, device=torch.device("cuda", 0)
        )
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default:
            assert torch.device(kwargs.pop("device")).type == "cpu"
            return args[0].held.clone()
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


def test_what_is_on_a_gpu_is_saved_as_its_bytes_and_loaded_to_the_cpu(reg: Registry) -> None:
    state, device = brain(), brain()
    weights = state["regions"]["cortex_l4"]["weights"]["feedforward"]
    assert bytes(copy_of(OnDevice(weights), weights.nbytes)) == weights.numpy().tobytes()
    if torch.cuda.is_available():
        device["regions"]["cortex_l4"]["weights"]["feedforward"] = weights.cuda()
    run = reg.create_run("brain", preset="thalia")
    saved = run.save(device, step=1, phase="s")
    with torch.device("meta"):  # where the program makes its own tensors does not matter
        loaded = saved.load()
    assert loaded["regions"]["cortex_l4"]["weights"]["feedforward"].device.type == "cpu"
    assert_same(loaded, state)
    assert run.save(state, step=2, phase="s").digest == saved.digest  # a device is no content
