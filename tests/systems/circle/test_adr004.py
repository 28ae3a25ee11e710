"""ADR-004's circle: trained here, gone on with by the document's class, and trained here again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.processes import run_apart, servers, start_process, without_holdfast
from tests.support.sameness import assert_same
from tests.systems.circle import adr004_program as program
from tests.systems.circle.adr004_program import ACCURACY, CARD, LOSS, RUN, Training


@pytest.fixture
def never_interrupted() -> Training:
    """Ten epochs in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training = Training()
    for _ in range(10):
        training.train()
    torch.set_num_threads(threads)
    return training


def test_a_training_goes_through_the_class_of_adr004_and_back(
    tmp_path: Path, never_interrupted: Training
) -> None:
    url, tree, again = str(tmp_path / "registry"), tmp_path / "in", tmp_path / "out"
    holdfast.init(url).close()
    assert run_apart(program.native, url, 3) == 0
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        run.releases.publish("1.0.0", run.latest(), card=CARD)
        run.exchange.checkout(tree)
        mine, its = servers().Pipe()
        given = program.__name__, "foreign", tree, 8, its
        theirs = start_process(without_holdfast, *given)
        its.close()
        for epoch in range(4, 9):
            assert mine.recv() == epoch
            # From epoch 7 on the class has removed training files whose milestones stay.
            reports = run.exchange.import_tree(tree)
            refused = {one.path: one.why for one in reports if one.outcome == "refused"}
            assert refused == {}
            assert run.refresh().latest().step == epoch
            mine.send("go on")
        theirs.join()
        assert theirs.exitcode == 0
        run.exchange.import_tree(tree)
    assert run_apart(program.native, url, 10) == 0
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        assert_same(run.latest().load(), never_interrupted.state({"accuracy": 0.68, "loss": 0.77}))
        milestones = [one.step for one in run.checkpoints() if one.tier == "milestone"]
        assert milestones == [1, 2, 3, 4, 5, 6, 7, 10]
        assert [one.step for one in run.checkpoints() if one.tier == "training"] == [8, 9]
        assert (run.best().step, run.best().metrics) == (6, {"accuracy": 0.72, "loss": 0.82})
        assert run.latest().meta == {"by": "native"}
        six = run.best()
        assert six.meta["import"]["file"] == "training/epoch_0006_step_00000018.pt"
        assert list(six.companions) == ["best_accuracy"]
        assert run.streams["training_history"].read() == [
            {"step": epoch, "accuracy": ACCURACY[epoch - 1], "loss": LOSS[epoch - 1]}
            for epoch in range(1, 11)
        ]
        assert [one.version for one in run.releases.list()] == ["1.0.0", "1.1.0"]
        assert run.releases.latest().card == CARD
        run.exchange.checkout(again)
    for path in tree.rglob("*.pt"):
        name = str(path.relative_to(tree))
        if name.startswith(("milestones", "production/b")):
            theirs, mine = (torch.load(one / name, weights_only=False) for one in (tree, again))
            assert_same(mine, theirs | ({"metadata": mine["metadata"]} if "epoch" in mine else {}))
    history = json.loads((again / "metadata/training_history.json").read_text())
    assert [one["step"] for one in history] == list(range(1, 11))
