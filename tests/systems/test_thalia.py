"""The life of a brain by Thalia's document: stages, growth, half precision, deltas, lazy regions.

`docs/systems.md` says row by row which test proves what of its document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpoint, Run, Storing, formats
from holdfast.formats import thalia as files
from holdfast.registry.errors import IncompatibleState, IntegrityError, InvalidInput, NotFound
from tests.support.sameness import assert_same
from tests.systems import thalia as acts
from tests.systems.brain import REGIONS, STAGES, STEPS, Brain, RegionState, grow
from tests.systems.life import Lives
from tests.systems.places import Place
from tests.systems.thalia import CHAPTERS, RUN, CurriculumTrainer, Story

pytestmark = pytest.mark.xdist_group("thalia")

LIVES = Lives(Story, CHAPTERS)
FEEDFORWARD = "weights/feedforward"


@pytest.fixture
def trained(story: Story) -> Iterator[Run]:
    """The run after the curriculum, for reading."""
    with holdfast.open(story.place.url, read_only=True) as reg:
        yield reg.run(RUN)


@pytest.fixture
def run(place: Place) -> Iterator[Run]:
    """An empty run by the preset."""
    with place.open() as reg:
        yield reg.create_run("other", preset="thalia")


def last(run: Run, stage: str) -> Checkpoint:
    found = run.latest(phase=stage)
    assert found is not None
    return found


# Stages


def test_each_stage_is_a_phase_that_is_saved_at_its_end(trained: Run) -> None:
    ends = {stage: last(trained, stage).step for stage in STAGES}
    assert ends == {stage: STEPS * (n + 1) for n, stage in enumerate(STAGES)}
    stages = {s: last(trained, s).meta["training_info"]["curriculum_stage"] for s in STAGES}
    assert stages == {stage: stage for stage in STAGES}
    assert len(trained.checkpoints()) == STEPS * len(STAGES)  # nothing is deleted


def test_growth_history_comes_back_from_the_metadata(trained: Run) -> None:
    first = {"step": STEPS, "region": "striatum", "type": "growth"}
    second = {"step": 2 * STEPS, "region": "hippocampus", "type": "growth"}
    history = last(trained, "grammar").meta["growth_history"]
    assert history == [
        {**first, "neurons_added": 16, "reason": "high_utilization"},
        {**second, "neurons_added": 0, "inputs_added": 8, "reason": "new_source"},
    ]
    assert last(trained, "sensorimotor").meta["growth_history"] == []


def test_growth_over_time_is_plotted(trained: Run) -> None:
    before = sum(rows for rows, _ in REGIONS.values())
    steps, neurons = [], []
    for line in trained.history.plot("neurons").data:
        steps += line.x
        neurons += line.y
    assert len(steps) == STEPS * len(STAGES)
    after = {step: before + 16 * (step > STEPS) for step in steps}  # the striatum, at a boundary
    assert dict(zip(steps, neurons, strict=True)) == after


def test_a_brain_grows_between_saves(trained: Run) -> None:
    shapes = {
        stage: last(trained, stage).tensors()[f"regions/striatum/{FEEDFORWARD}"].shape
        for stage in STAGES
    }
    assert shapes["sensorimotor"] == (24, 48)
    assert shapes["phonology"] == shapes["grammar"] == (40, 48)
    wide = last(trained, "toddler").tensors()[f"regions/hippocampus/{FEEDFORWARD}"].shape
    assert wide == (40, 32)


def test_a_curriculum_in_four_processes_ends_like_one_in_a_single_process(
    place: Place,
) -> None:
    acts.curriculum(Story(place))
    brain = Brain()
    for stage in STAGES:
        grow(brain, stage)
        for _ in range(STEPS):
            brain.train()
    with place.open() as reg:
        found = last(reg.run(RUN), STAGES[-1])
        assert_same(found.load(), brain.get_full_state())
        assert found.meta["growth_history"] == brain.growth_history


@pytest.mark.parametrize("stage", STAGES)
def test_training_resumes_from_any_stage(story: Story, stage: str) -> None:
    with story.place.open() as reg:
        forked = reg.fork(last(reg.run(RUN), stage).ref)
        trainer = CurriculumTrainer(forked, Brain())
        restored = forked.restore()
        assert restored is not None
        trainer.brain.load_full_state(restored.state)
        trainer.brain.growth_history = list(restored.checkpoint.meta["growth_history"])
        for later in STAGES[STAGES.index(stage) + 1 :]:
            grow(trainer.brain, later)
            trainer.train_stage(later)
        assert_same(trainer.brain.get_full_state(), last(reg.run(RUN), STAGES[-1]).load())


def test_load_checkpoint_goes_back_to_a_stage(place: Place) -> None:
    with place.open() as reg:
        trainer = acts.resumed(reg)
        for stage in STAGES[:3]:
            grow(trainer.brain, stage)
            trainer.train_stage(stage)
        trainer.load_checkpoint(STAGES[0])
        assert trainer.brain.steps == STEPS
        assert trainer.brain.growth_history == []
        trainer.train_stage("phonology")
        assert last(trainer.run, "phonology").step == 2 * STEPS
        assert trainer.run.latest(phase="toddler") is None  # superseded


# State


def test_a_full_state_with_dataclasses_comes_back(run: Run) -> None:
    brain = Brain()
    saved = run.save(brain.get_full_state(), step=0)
    state = saved.load()
    assert type(state["regions"]["striatum"]["neuron_state"]) is RegionState
    assert_same(state, brain.get_full_state())
    other = Brain()
    other.train()
    other.load_full_state(state)
    brain.train()
    other.train()
    assert_same(other.get_full_state(), brain.get_full_state())


def test_a_state_without_regions_is_refused(run: Run) -> None:
    with pytest.raises(IncompatibleState, match="missing: regions"):
        run.save({"pathways": {}, "config": {}}, step=0)


# Lazy regions


def test_single_regions_are_loaded_and_nothing_else_is_read(place: Place) -> None:
    with place.open() as reg:
        run = reg.create_run("lazy", preset="thalia")
        brain = Brain()
        saved = run.save(brain.get_full_state(), step=0)
        place.damage_tensor(saved, f"regions/hippocampus/{FEEDFORWARD}")
    with place.open() as reg:
        stored = reg.run("lazy").latest()
        assert stored is not None
        some = stored.load(only=["regions/cortex_l4", "regions/striatum", "theta"])
        assert list(some) == ["regions", "theta"]
        assert_same(
            some["regions"], {name: brain.regions[name] for name in ("cortex_l4", "striatum")}
        )
        lazy = stored.lazily("regions")
        assert list(lazy) == list(brain.regions)
        assert_same(lazy["striatum"], brain.regions["striatum"])
        with pytest.raises(IntegrityError):  # at its first access
            lazy["hippocampus"]
        with pytest.raises(NotFound, match=r"regions/cortex_l5.*cortex_l4"):
            stored.load(only="regions/cortex_l5")


# Precision


def dtypes(saved: Checkpoint) -> dict[str, str]:
    """Return the stored dtype of each tensor of the first region, by the last steps of its path."""
    begin = "regions/cortex_l4/"
    return {
        path.removeprefix(begin): info.dtype
        for path, info in saved.tensors().items()
        if path.startswith(begin)
    }


HALF = {
    FEEDFORWARD: "float16",
    "weights/bias": "float16",
    "neuron_state/spikes": "bool",
    "neuron_state/membrane": "float32",
    "neuron_state/traces": "float16",
    "learning_state/bcm_threshold": "float32",
}


def test_fp16_keeps_thresholds_and_membrane_and_loads_as_fp32(run: Run) -> None:
    brain = Brain()
    saved = run.save(brain.get_full_state(), step=0, storing=Storing(precision="fp16"))
    assert dtypes(saved) == HALF
    weights = saved.load()["regions"]["cortex_l4"]["weights"]["feedforward"]
    exact = brain.regions["cortex_l4"]["weights"]["feedforward"]
    assert weights.dtype == torch.float32
    assert torch.equal(weights, exact.half().float())
    assert (
        saved.load(precision="stored", only="regions")["regions"]["cortex_l4"]["weights"][
            "feedforward"
        ].dtype
        is torch.float16
    )


def test_mixed_narrows_only_large_weights(run: Run) -> None:
    brain = Brain()
    brain.regions["cortex_l4"]["weights"]["feedforward"] = torch.ones(520, 520)  # 1.03 MiB
    saved = run.save(brain.get_full_state(), step=0, storing=Storing(precision="mixed"))
    assert dtypes(saved) == {**HALF, "weights/bias": "float32"}
    small = saved.tensors()[f"regions/striatum/{FEEDFORWARD}"]
    assert small.dtype == "float32"


def test_a_custom_policy_is_a_mapping_of_patterns(run: Run) -> None:
    policy = {"*bias": "keep", "*/weights/*": "fp16", "*threshold*": "keep"}  # the first counts
    saved = run.save(Brain().get_full_state(), step=0, storing=Storing(precision=policy))
    assert dtypes(saved) == {
        **HALF,
        "weights/bias": "float32",
        "neuron_state/traces": "float32",
    }
    exact = run.save(Brain().get_full_state(), step=1, storing=Storing(precision="fp32"))
    assert {info.dtype for info in exact.tensors().values()} == {"float32", "bool"}
    with pytest.raises(InvalidInput, match=r"expected .*fp16, mixed"):
        run.save(Brain().get_full_state(), step=2, storing=Storing(precision="fp15"))


def test_the_archive_of_a_stage_is_half_as_large(trained: Run, run: Run) -> None:
    full = last(trained, "grammar")
    archive = run.save(
        full.load(), step=full.step, storing=Storing(precision="fp16"), meta=full.meta
    )
    assert archive.size_bytes < 0.56 * full.size_bytes


# Growth and deltas


def added_by(place: Place, name: str, grown: torch.Tensor, **more: torch.Tensor) -> float:
    """Return the share of a grown matrix of 4 MiB that its save writes."""
    with place.open() as reg:
        run = reg.create_run(name, preset="thalia")
        run.save(regions(GROWING), step=1)
        before = place.size_bytes()
        run.save(regions(grown, **more), step=2)
        return (place.size_bytes() - before) / (grown.numel() * 4)


def regions(weights: torch.Tensor, **more: torch.Tensor) -> dict[str, Any]:
    region = {"weights": {"feedforward": weights, **more}}
    return {"regions": {"cortex": region}, "pathways": {}, "config": {}}


GROWING = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))


def test_growth_by_neurons_stores_the_new_rows_alone(place: Place) -> None:
    new = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    assert added_by(place, "rows", torch.cat([GROWING, new])) < 0.1


def test_growth_by_inputs_writes_the_tensor_again(place: Place) -> None:
    new = torch.zeros(1024, 64)
    assert added_by(place, "columns", torch.cat([GROWING, new], 1)) > 0.8
    assert added_by(place, "apart", GROWING, feedforward_2=new) < 0.1


# Files


def test_a_delta_in_half_precision_and_compressed_is_a_fraction_of_a_file(tmp_path: Path) -> None:
    whole = torch.randint(1000, (300, 300), generator=torch.Generator().manual_seed(1))
    weights = whole.float()  # with the halves below, float16 holds them
    base = tmp_path / "stage2.thalia"
    full = files.save(base, regions(weights), precision="fp16").size_bytes
    weights[7, :40] += 0.5
    link = tmp_path / "stage3.delta.thalia.zst"
    small = files.save_delta(
        link,
        regions(weights),
        base,
        precision="fp16",
        compression="zstd",
        level=9,
    ).size_bytes
    assert small < 0.05 * full  # "Expected total savings: 95-99%"
    found = files.load(link).state["regions"]["cortex"]["weights"]["feedforward"]
    assert found.dtype == torch.float32
    assert torch.equal(found, weights)


def plain(saved: Checkpoint) -> dict[str, Any]:
    """Return a state for Thalia's files, which keep dataclasses as dicts."""
    state = saved.load()
    for region in state["regions"].values():
        region["neuron_state"] = vars(region["neuron_state"])
    del state["trial_state"]
    return state


def test_a_file_is_compressed_narrowed_and_validated(trained: Run, tmp_path: Path) -> None:
    state = plain(last(trained, "grammar"))
    sizes = {}
    for name, options in {
        "full.thalia": {},
        "half.thalia": {"precision": "fp16"},
        "archive.thalia.zst": {"precision": "fp16", "compression": "zstd", "level": 22},
        "fast.thalia.lz4": {"compression": "lz4", "level": 1},
    }.items():
        sizes[name] = files.save(tmp_path / name, state, **options).size_bytes
        assert formats.validate(tmp_path / name) == []
    assert sizes["archive.thalia.zst"] < sizes["half.thalia"] < sizes["full.thalia"]
    assert sizes["fast.thalia.lz4"] < sizes["full.thalia"]
    broken = bytearray((tmp_path / "full.thalia").read_bytes())
    broken[len(broken) // 2] ^= 1
    (tmp_path / "full.thalia").write_bytes(broken)
    assert formats.validate(tmp_path / "full.thalia")


def test_mostly_zero_tensors_are_sparse_in_files(tmp_path: Path) -> None:
    sparse, dense = torch.zeros(100, 100), torch.ones(100, 100)
    sparse[0, :5] = 1
    small = files.save(tmp_path / "sparse.thalia", regions(sparse)).size_bytes
    large = files.save(tmp_path / "dense.thalia", regions(dense)).size_bytes
    assert small < large / 10
    found = files.load(tmp_path / "sparse.thalia").state
    assert torch.equal(found["regions"]["cortex"]["weights"]["feedforward"], sparse)


# Diff and merge


def test_two_trainings_are_merged(story: Story) -> None:
    with story.place.open() as reg:
        made = []
        for _ in range(2):
            forked = reg.fork(last(reg.run(RUN), "grammar").ref)
            state = forked.restore().state
            state["regions"]["striatum"]["weights"]["feedforward"] += len(made) * 2.0
            made.append(forked.save(state, step=1000, phase="grammar"))
        merged = forked.exchange.merge(made, step=1001, phase="grammar")
        weights = [
            one.load()["regions"]["striatum"]["weights"]["feedforward"] for one in (*made, merged)
        ]
        assert torch.allclose(weights[2], weights[0] + 1.0)


def test_nothing_is_damaged(story: Story) -> None:
    with story.place.open() as reg:
        assert reg.verify(deep=True).ok
