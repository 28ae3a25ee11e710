"""Thalia's circle: trained here, gone on with in its own files, and trained here again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import formats
from holdfast.formats import thalia
from tests.support.processes import run_apart, without_holdfast
from tests.support.sameness import assert_same
from tests.systems.brain import SEED, STAGES, STEPS, Brain, grow
from tests.systems.circle import thalia_program as program
from tests.systems.circle.thalia_program import read
from tests.systems.thalia import RUN, CurriculumTrainer

ROOT = Path(__file__).parents[3]
#: The command in a process of its own, which has no adapter, and the fault that is made, if any.
COMMAND = (
    "from tests.systems.mutants import make_named; make_named();"
    "from holdfast.registry.cli import main; main()"
)


def holdfast_command(*arguments: object) -> str:
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("one_thread")
def test_a_brain_goes_on_in_files_and_comes_back(tmp_path: Path) -> None:
    url, folder = str(tmp_path / "registry"), tmp_path / "brains"
    holdfast.init(url).close()
    assert run_apart(program.native, url, *STAGES[:2]) == 0
    holdfast_command("pull", "-r", url, RUN, "--to", folder, "--layout", "preset")
    assert run_apart(without_holdfast, program.__name__, "foreign", folder, STAGES[2]) == 0
    told = holdfast_command("push", "-r", url, folder, RUN, "--layout", "thalia")
    assert told.count("imported: ") == STEPS, told
    assert run_apart(program.native, url, STAGES[3]) == 0

    brain = Brain()
    with holdfast.open(url) as reg:
        straight = reg.create_run("straight", preset="thalia", seed=SEED)
        for stage in STAGES:
            grow(brain, stage)
            CurriculumTrainer(straight, brain).train_stage(stage)
        pairs = list(zip(reg.run(RUN).checkpoints(), straight.checkpoints(), strict=True))
        assert len(pairs) == STEPS * len(STAGES)
        for one, other in pairs:
            assert (one.phase, one.step, one.metrics) == (other.phase, other.step, other.metrics)
            assert one.digest == other.digest  # of a training that never left, bit for bit
            assert {key: one.meta[key] for key in other.meta} == other.meta
            assert ("import" in one.meta) == (one.phase == STAGES[2])
        reg.run(RUN).exchange.checkout(folder)
        archive, archived = tmp_path / "archive", reg.create_run("archive", preset="thalia")
        archive.mkdir()
        full, link, last = (one for one, _ in pairs[-3:])
        names = ("14.thalia.zst", "15.delta.thalia", "16.delta.thalia", "17.delta.thalia.zst")
        paths = [archive / f"stage{name}" for name in names]
        thalia.save(paths[0], full, level=9)
        for number, one in ((1, link), (2, last)):
            thalia.save_delta(paths[number], one, paths[number - 1], threshold=0)
        thalia.save_delta(paths[3], last, paths[1], precision="fp16")
        reports = archived.exchange.import_tree(archive, layout="thalia")
        assert [one.outcome for one in reports] == ["imported"] * 4
        digests = [one.digest for one in archived.checkpoints()]
        assert digests[:3] == [full.digest, link.digest, last.digest]
        for found in (archived.latest().load(), read(paths[3])[0]):
            for name, region in brain.regions.items():
                weights = found["regions"][name]["weights"]["feedforward"].float()
                assert torch.allclose(weights, region["weights"]["feedforward"], 1e-2, 1e-2)
    about = json.loads((folder / "stage16.thalia.meta").read_text())
    assert about["growth_history"] == brain.growth_history
    newest = folder / "stage16.thalia"
    assert thalia.BrainCheckpoint.info(newest)["total_neurons"] == brain.neurons
    lazy = thalia.BrainCheckpoint.load(newest, regions=["striatum"], lazy=True)
    assert_same(dict(lazy.regions), brain.regions)
    for path in (paths[2], newest):
        state, metadata = read(path)
        assert_same(state, brain.get_full_state())
        assert metadata["growth_history"] == brain.growth_history
        assert metadata["training_info"]["curriculum_stage"] == STAGES[3]
        assert formats.validate(path) == []
