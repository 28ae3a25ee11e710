"""Hydra's circle: trained here, gone on with by records of Burn, and trained here again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.registry.errors import IncompatibleState
from tests.support.processes import run_apart, without_holdfast
from tests.support.sameness import assert_same
from tests.systems.circle import hydra_program

pytest.importorskip("msgpack")
RUN, POOL, SAVES = "20260115_143022_a1b2c3d4", hydra_program.POOL, "phase3/checkpoints"


def never_interrupted(url: str, until: int) -> dict[str, object]:
    """Return the last state of a training that stays in one process, and with Holdfast."""
    holdfast.init(url).close()
    threads = torch.get_num_threads()
    hydra_program.native(url, RUN, until)
    torch.set_num_threads(threads)
    with holdfast.open(url) as reg:
        state: dict[str, object] = reg.run(RUN).latest().load()
        return state


def test_a_league_goes_through_records_of_burn_and_back(tmp_path: Path) -> None:
    url, tree, again = str(tmp_path / "registry"), tmp_path / "in", tmp_path / "out"
    holdfast.init(url).close()
    assert run_apart(hydra_program.native, url, RUN, 22_500) == 0
    with holdfast.open(url) as reg:
        reg.run(RUN).exchange.checkout(tree)
        kept = {one: one.read_bytes() for one in tree.rglob("*.sha256")}
        foreign = hydra_program.__name__, "foreign", tree, 23_500
        assert run_apart(without_holdfast, *foreign) == 0
        reports = reg.run(RUN).exchange.import_tree(tree)
        assert {one.outcome for one in reports} == {"there already", "imported"}
        assert sorted(one.path for one in reports if one.outcome == "imported") == [
            "eval/eval.jsonl",
            *(f"{SAVES}/ckpt_phase3_step000{step}.{kind}mpk"
              for step in (23000, 23500) for kind in ("kl_anchor.", "")),
            f"{POOL}/pool_v0006_step00023000.mpk",
            f"{POOL}/pool_v0007_step00023500.mpk",
        ]  # fmt: skip
        entries = {one.version: one for one in reg.run(RUN).pool.roster()}
        assert {n: one.gate for n, one in entries.items() if one.frozen} == {
            1: "distill_best",
            2: "bc_best",
        }
        six = entries[6]
        assert (six.mu, six.sigma, six.games, six.wins, six.win_rate) == (24.0, 2.25, 5, 3, 0.6)
        assert str(six.promoted) == "2026-03-01 12:00:00+00:00"
        assert six.checkpoint == reg.run(RUN).checkpoints(3)[-2].handle.n
        assert (entries[5].mu, entries[5].games) == (24.0, 2)
        assert not reg.verify(deep=True).findings
    assert run_apart(hydra_program.native, url, RUN, 24_500) == 0
    with holdfast.open(url) as reg:
        run = reg.run(RUN)
        assert_same(run.latest().load(), never_interrupted(str(tmp_path / "other"), 24_500))
        assert [(one.version, one.step) for one in run.pool.roster()][5:] == [
            (6, 23_000), (7, 23_500), (8, 24_000), (9, 24_500),
        ]  # fmt: skip
        drawn = {one.version for one in run.pool.draws(0, 300)}
        assert drawn == {None, 1, *range(3, 10)}  # the baseline of phase 2, and all but the anchors
        assert [one["step"] for one in run.streams["eval"].read()] == list(
            range(21_500, 24_501, 500)
        )
        assert run.best(3).step == 24_500
        assert run.exchange.checkout(again).left == {}
    for path, sidecar in kept.items():
        assert (again / path.relative_to(tree)).read_bytes() == sidecar
    for name in (f"{SAVES}/ckpt_phase3_step00023500", f"{POOL}/pool_v0007_step00023500"):
        assert (again / f"{name}.mpk").read_bytes() == (tree / f"{name}.mpk").read_bytes()
    about = f"{POOL}/pool_v0006_step00023000.meta.json"
    assert json.loads((again / about).read_text()) == json.loads((tree / about).read_text())
    assert (again / SAVES / "latest.mpk").readlink() == Path("ckpt_phase3_step00024500.mpk")
    _, item = hydra_program.read(again / SAVES / "ckpt_phase3_step00024500.mpk")
    assert item["opponent_pool_metadata"] == {"roster": list(range(1, 9))}
    for moments in item["optimizer_record"].values():
        assert moments["momentum"]["moment_1"].dtype == torch.float32


def test_moments_of_burn_stay_fp32(tmp_path: Path) -> None:
    state = hydra_program.trained(hydra_program.first_state())
    momentum = state["optimizer_record"]["STEM"]["momentum"]
    momentum["moment_2"] = momentum["moment_2"].to(torch.bfloat16)
    with holdfast.init(str(tmp_path / "registry")) as reg:
        run = reg.create_run(RUN, preset="hydra")
        with pytest.raises(IncompatibleState, match="moment_2 is bfloat16, must be float32"):
            run.save(state, step=state["global_step"])
