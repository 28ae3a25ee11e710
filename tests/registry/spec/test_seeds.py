"""Seeds of phases and components: NumPy's tree, by its own numbers."""

from __future__ import annotations

import pytest
from numpy.random import SeedSequence

from holdfast.registry.errors import InvalidInput
from holdfast.registry.spec import Phase, RunSpec
from holdfast.registry.spec.seeds import child, phase_number, phase_sequence

#: Master seed, phase, component -> generate_state(8), little-endian. Golden numbers of NumPy 2.4.6.
VECTORS = {
    (0, 1, 0): "fd0ea3ebe78a25a0667047873620714570cf5e454ba6f9fb1ac11b39b6b7318c",
    (42, 1, 4): "999a4f27108b6a7f59c863735e5e39e04efee801aca40667513b5b22e2aa45e6",
    (42, 3, 4): "7803aa63fe1cd79882a7f5a74312d0eeb0d812101cc455d74ae75df24a25b9da",
    (0xA1B2C3D4, 3, 0): "ec4748ed3ff5219ad4df67b64429092a8ebbdaa49094fe566fb4fc015585b8d8",
    (2**64 - 1, 3, 4): "d2d0841d14c9d774223fe6f3d9cd4a3f060720b23df65e2ec67412d2a06e5307",
}


@pytest.mark.parametrize(("place", "words"), VECTORS.items())
def test_a_component_has_its_golden_numbers(place, words):
    assert child(*place).generate_state(8).astype("<u4").tobytes().hex() == words


def test_a_component_is_the_child_that_its_phase_spawns():
    for phase in (1, 3):
        spawned = phase_sequence(7, phase).spawn(6)
        for index, one in enumerate(spawned):
            same = child(7, phase, index).generate_state(4).tolist()
            assert same == one.generate_state(4).tolist()
    assert phase_sequence(7, 2).spawn_key == SeedSequence(7, spawn_key=(2,)).spawn_key


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((-1, 1, 0), "seed: out of range.*below 2\\^64"),
        ((2**64, 1, 0), "seed: out of range"),
        ((True, 1, 0), "seed: out of range"),
        ((1.5, 1, 0), "seed: out of range"),
        ((1, 2**32, 0), "phase: out of range.*below 2\\^32"),
        ((1, "2", 0), "phase: out of range"),
        ((1, 1, -1), "component: out of range"),
        ((1, 1, 2**32), "component: out of range"),
    ],
)
def test_numbers_out_of_range_are_refused(place, told):
    with pytest.raises(InvalidInput, match=told):
        child(*place)


def spec(*names: str) -> RunSpec:
    return RunSpec(phases=tuple(Phase(name=name) for name in names))


def test_the_number_of_a_phase():
    assert phase_number(spec("1", "3"), "3") == 3
    assert phase_number(spec("warmup", "2", "main"), "2") == 2
    assert phase_number(spec("warmup", "2", "main"), "main") == 3
    # Where one has a name, numbers are places: two phases never share their seeds.
    assert phase_number(spec("2", "main"), "2") == 1
    assert phase_number(RunSpec(), "7") == 7


@pytest.mark.parametrize("declared", [spec(), spec("warmup"), spec("1")])
def test_a_phase_without_a_number_has_no_seeds(declared):
    with pytest.raises(InvalidInput, match="phase main: a phase without a number"):
        phase_number(declared, "main")


def test_a_run_gives_the_seeds_of_its_components(reg):
    run = reg.create_run("seeded", seed=42, preset=spec("1", "2", "3"))

    def words(sequence):
        return sequence.generate_state(8).astype("<u4").tobytes().hex()

    assert words(run.phases.seed_sequence(4, phase=3)) == VECTORS[42, 3, 4]
    assert words(run.phases.seed_sequence(4)) == VECTORS[42, 1, 4]  # before anything was saved
    run.save({"m": {}}, step=1, phase=3)
    assert words(run.phases.seed_sequence(4)) == VECTORS[42, 3, 4]


def test_a_run_without_phases_has_the_seeds_of_numbers_alone(run):
    with pytest.raises(InvalidInput, match="phase main"):
        run.phases.seed_sequence(0)
    assert run.phases.seed_sequence(0, phase=1).spawn_key == (1, 0)
