"""Trees of other systems: out of a run, into another one, and out again."""

from __future__ import annotations

import filecmp
import gzip
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.registry import formats
from holdfast.registry.face.registry import Registry
from holdfast.registry.formats.table import NAMES
from holdfast.registry.layouts import import_spec
from holdfast.registry.spec.presets import load_preset
from tests.support.foreign import foreign
from tests.support.sameness import assert_same

NOTES = ".holdfast-checkout"


def names(root: Path) -> list[str]:
    """Return the names of all files and links below a folder, without the notes of checkouts."""
    return sorted(
        str(one.relative_to(root))
        for one in root.rglob("*")
        if NOTES not in one.parts and (one.is_symlink() or not one.is_dir())
    )


def links(root: Path) -> dict[str, str]:
    return {one: str((root / one).readlink()) for one in names(root) if (root / one).is_symlink()}


def copied(source: Path, target: Path) -> Path:
    """Copy a sample tree; links that were not kept are files with the name of their target."""
    shutil.copytree(source, target, symlinks=True, copy_function=shutil.copyfile)
    for one in (target, *target.rglob("*")):
        if not one.is_symlink():
            one.chmod(0o755)
    for one in target.rglob("latest.pt"):
        if not one.is_symlink():
            named = one.read_text()
            one.unlink()
            one.symlink_to(named)
    return target


def through(reg: Registry, tree: Path, layout: str, out: Path) -> Any:
    """Import a tree into a new run, and check that out; return the reports by name."""
    run = reg.create_run(f"run-{out.name}", preset=import_spec(layout))
    reports = {one.path: one for one in run.exchange.import_tree(tree, layout=layout)}
    assert run.exchange.checkout(out, layout=layout).left == {}
    assert {one.outcome for one in run.exchange.import_tree(tree, layout=layout)} <= {
        "there already", "refused", "passed over"
    }  # fmt: skip
    return reports


def adr_state(epoch: int, **more: object) -> dict[str, object]:
    return {
        "version": "1.0.0",
        "timestamp": f"2025-10-{epoch:02d}",
        "model_state_dict": {"w": torch.full((3,), float(epoch))},
        "epoch": epoch,
        "metrics": {"accuracy": 0.9 + epoch / 1000, "loss": 1 / epoch},
        "config": {"d_model": 6},
        **more,
    }


def adr_tree(root: Path) -> Path:
    """Write a tree by the code of the document, with `latest.pt` as it leaves it."""
    for name in ("training", "milestones", "production", "metadata/model_cards"):
        (root / name).mkdir(parents=True)

    for epoch in (8, 9, 10):
        name = f"training/epoch_{epoch:04d}_step_{epoch * 1000:08d}.pt"
        torch.save(adr_state(epoch, global_step=epoch * 1000, git_commit=None), root / name)
    torch.save(adr_state(5), root / "milestones/epoch_0005.pt")
    torch.save(adr_state(10), root / "milestones/epoch_0010.pt")
    torch.save(adr_state(9), root / "milestones/best_loss_0.1111_epoch_0009.pt")
    torch.save(adr_state(9, extra=1), root / "milestones/best_accuracy_0.9090_epoch_0009.pt")
    (root / "training/latest.pt").symlink_to("epoch_0010_step_00010000.pt")
    card = {
        "dataset": "IMDB", "description": "d", "intended_use": "u",
        "performance": {"accuracy": 0.9}, "training_date": "2025-10-25",
    }  # fmt: skip
    for version in ("1.0.0", "1.0.1"):
        production = {
            "version": version,
            "model_state_dict": {"w": torch.ones(3)},
            "config": {"d_model": 6},
            "metrics": {"accuracy": 0.9, "uncertainty_calibration": {"ece": 0.03}},
            "model_card": card,
        }
        torch.save(production, root / f"production/bayesian_transformer_v{version}.pt")
        lines = "".join(
            f"{key}: {card[key]}\n" if key != "performance" else "performance:\n  accuracy: 0.9\n"
            for key in sorted(card)
        )
        (root / f"metadata/model_cards/v{version}.yaml").write_text(lines)
    (root / "production/latest.pt").symlink_to("bayesian_transformer_v1.0.0.pt")
    return root


def test_files_of_a_checkout_are_read_by_torch(reg: Registry, tmp_path: Path) -> None:
    hydra_run(reg).exchange.checkout(tmp_path)
    files = [one for one in names(tmp_path) if one.endswith(".pt")]
    assert len(files) > 8
    for one in files:
        assert torch.load(tmp_path / one, weights_only=True)


def test_tree_of_adr004_comes_back_with_its_names_links_and_tensors(
    reg: Registry, tmp_path: Path
) -> None:
    tree, out = adr_tree(tmp_path / "in"), tmp_path / "out"
    through(reg, tree, "adr004", out)
    assert names(out) == names(tree)
    assert links(out) == links(tree)  # `production/latest.pt` had been rolled back
    for name in names(tree):
        if name.endswith(".pt"):
            assert_same(
                torch.load(out / name, weights_only=True),
                torch.load(tree / name, weights_only=True),
            )


@pytest.mark.parametrize("has_links", [True, False])
def test_a_sample_tree_is_copied_with_its_links(tmp_path: Path, has_links: bool) -> None:
    sample = tmp_path / "sample"
    (sample / "training").mkdir(parents=True)
    torch.save({"epoch": 1}, sample / "training/epoch_0001.pt")
    latest = sample / "training/latest.pt"
    if has_links:
        latest.symlink_to("epoch_0001.pt")
    else:
        latest.write_text("epoch_0001.pt")
    tree = copied(sample, tmp_path / "tree")
    assert links(tree) == {"training/latest.pt": "epoch_0001.pt"}
    assert (tree / "training/latest.pt").read_bytes() == (
        sample / "training/epoch_0001.pt"
    ).read_bytes()


def test_real_tree_of_adr004_comes_back(reg: Registry, tmp_path: Path) -> None:
    tree, out = copied(foreign("adr/checkpoints"), tmp_path / "in"), tmp_path / "out"
    reports = through(reg, tree, "adr004", out)
    bad = "training/epoch_0005_step_00006000.pt"  # the document's own loader refuses it too
    assert reports[bad].outcome == "refused"
    assert reports["training/epoch_0011_step_00013000.pt.tmp"].outcome == "passed over"
    taken = [one for one in names(tree) if reports.get(one) is None or one != bad]
    assert names(out) == [one for one in taken if not one.endswith(".tmp")]
    assert links(out) == links(tree)
    for name in names(out):
        if name.endswith(".pt"):
            before = formats.read(tree / name).state
            if "metadata" in before:  # in a file that `weights_only` accepts it is a plain str
                version = before["metadata"]["pytorch_version"]
                before["metadata"]["pytorch_version"] = str(version)
            assert_same(formats.read(out / name).state, before)


def test_native_run_has_the_names_of_adr004(reg: Registry, tmp_path: Path) -> None:
    run = reg.create_run("adr", preset="adr004")
    for epoch, loss in ((1, 3.0), (2, 4.0), (3, 5.0), (4, 5.0), (5, 6.0), (6, 7.0)):
        run.exchange.push(
            {"version": "1.0.0", "model_state_dict": {"w": torch.ones(1) * epoch}, "config": {},
             "global_step": epoch * 100},
            step=epoch, metrics={"loss": loss},
        )  # fmt: skip
    run.exchange.checkout(tmp_path / "out")
    assert names(tmp_path / "out") == [
        "milestones/best_loss_3.0000_epoch_0001.pt",
        "milestones/epoch_0005.pt",
        *(f"training/epoch_{epoch:04d}_step_{epoch:06d}00.pt" for epoch in (4, 5, 6)),
        "training/latest.pt",
    ]


def test_tree_of_andrea_comes_back_byte_for_byte(reg: Registry, tmp_path: Path) -> None:
    tree = copied(foreign("andrea"), tmp_path / "in")
    for extra in ("expected.json", "step_000100.bin.expected.npz"):
        (tree / extra).unlink()
    first = (tree / "step_000100.bin").read_bytes()
    (tree / "step_000200.bin").write_bytes((200).to_bytes(4, "little") + first[4:])
    for one in tree.glob("run.*"):
        one.rename(tree / f"small{one.name.removeprefix('run')}")
    through(reg, tree, "andrea", tmp_path / "out")
    assert names(tmp_path / "out") == names(tree)
    for name in names(tree):
        if name.endswith(".bin"):
            assert (tree / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        else:
            assert json.loads((tree / name).read_text()) == json.loads(
                (tmp_path / "out" / name).read_text()
            )


def test_policies_of_cobre_come_back(reg: Registry, tmp_path: Path) -> None:
    tree = copied(foreign("cobre/v0.5.1"), tmp_path / "in")
    (tree / "expected.json").unlink()
    through(reg, tree, "cobre", tmp_path / "out")
    assert names(tmp_path / "out") == names(tree)
    for name in names(tree):
        assert (tmp_path / "out" / name).read_bytes() == (tree / name).read_bytes(), name


def test_brains_of_thalia_come_back(reg: Registry, tmp_path: Path) -> None:
    tree = tmp_path / "in"
    tree.mkdir()
    for number, name in ((1, "minimal.thalia"), (2, "full.thalia")):
        shutil.copyfile(foreign(f"thalia/{name}"), tree / f"stage{number}.thalia")
    out = tmp_path / "out"
    through(reg, tree, "thalia", out)
    assert links(out) == {"latest.thalia": "stage2.thalia"}
    assert {"stage1.thalia", "stage2.thalia", "stage2.thalia.meta"} <= set(names(out))
    for name in ("stage1.thalia", "stage2.thalia"):
        assert formats.validate(out / name) == []
        assert_same(
            formats.read(out / name).state["regions"], formats.read(tree / name).state["regions"]
        )
    shutil.copyfile(foreign("thalia/full.thalia.zst"), tree / "stage3.thalia.zst")
    run = reg.run("run-out")
    run.exchange.import_tree(tree)
    assert "stage3.thalia.zst" not in run.exchange.checkout(tree).written
    assert not (tree / "stage3.thalia").exists()
    run.exchange.checkout(out)
    assert formats.inspect(out / "stage3.thalia.zst").size_bytes < 10_000  # compressed
    meta = json.loads((out / "stage2.thalia.meta").read_text())
    assert (meta["step"], meta["phase"], meta["metrics"]) == (2, "main", {})
    described = formats.inspect(out / "stage2.thalia").tensors
    assert {path: (dtype, tuple(shape)) for path, (dtype, shape) in meta["tensors"].items()} == {
        path: (one.dtype, one.shape) for path, one in described.items()
    }


def hydra_state(phase: int, step: int, value: float) -> dict[str, Any]:
    more: dict[int, dict[str, Any]] = {
        2: {"teacher_state_dict": {"t": torch.ones(2, dtype=torch.bfloat16)}},
        3: {"opponent_pool_metadata": {"next": 1}},
    }
    return {
        "model_record": {"w": torch.full((4,), value, dtype=torch.bfloat16)},
        "optimizer_record": {"0": {"exp_avg": torch.zeros(4)}},
        "scheduler_record": {},
        "rng_state": {"cursor": step},
        "global_step": step,
        "phase": phase,
        "config": {"lr": 0.1},
        "metrics": {"heldout_ce": 1 / value, "mu": 25 + value, "sigma": 2.0},
        "timestamp": 1000 + step,
        "checkpoint_version": 1,
        **more.get(phase, {}),
    }


def hydra_run(reg: Registry, name: str = "hydra") -> Any:
    """Return a run with three phases, two gates, a pool, an artifact and a stream."""
    spec = load_preset("hydra").changed(transitions=())
    run = reg.create_run(name, preset=spec)
    for phase, step, value in (
        (1, 10_000, 3.0), (1, 20_000, 4.0), (1, 30_000, 3.0),
        (2, 30_500, 1.0), (2, 31_000, 2.0), (3, 40_500, 2.0), (3, 41_000, 1.0),
    ):  # fmt: skip
        anchor = {} if phase == 1 else {"kl_anchor": {"policy": torch.ones(2)}}
        state = hydra_state(phase, step, value)
        run.exchange.push(
            state, step=step, phase=phase, metrics=state["metrics"], companions=anchor
        )
    run.pins.gates.set("bc_best")
    run.pins.gates.set("distill_best")
    run.pins.artifacts.set("grp", {"grp": torch.ones(3)})
    run.streams["eval"].append({"step": 1, "placement": 2.5})
    return run


def test_tree_of_hydra_comes_back_byte_for_byte(reg: Registry, tmp_path: Path) -> None:
    tree, out = tmp_path / "in", tmp_path / "out"
    hydra_run(reg).exchange.checkout(tree)
    # As the document spells them.
    model = "phase3/opponent_pool/pool_v0001_step00040500"
    checkpoint = "phase2/checkpoints/ckpt_phase2_step00030500.pt"
    assert {checkpoint, f"{model}.pt", f"{model}.meta.json", "gates/bc_best.pt"} <= set(names(tree))
    assert list(json.loads((tree / f"{model}.meta.json").read_text())) == [
        *("version", "global_step", "phase", "mu", "sigma", "games_played", "win_rate"),
        "promoted_at",
    ]
    (tree / "eval").mkdir(exist_ok=True)
    (tree / "eval/seeds.json").write_text("[1, 2]")
    (tree / "eval/seeds.json.sha256").write_text(
        f"{hashlib.sha256(b'[1, 2]').hexdigest()}  seeds.json\n"
    )
    for name in names(tree):  # retention has taken the checkpoint of a gate
        if "step00020000" in name or name == "phase1/checkpoints/best.pt":
            (tree / name).unlink()
    through(reg, tree, "hydra", out)
    assert names(out) == names(tree)
    assert links(out) == links(tree)
    matches, _, _ = filecmp.cmpfiles(tree, out, names(tree), shallow=False)
    assert sorted(matches) == names(tree)


def test_sidecars_pass_sha256sum(reg: Registry, tmp_path: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum here")
    hydra_run(reg).exchange.checkout(tmp_path)
    sidecars = [one for one in names(tmp_path) if one.endswith(".sha256")]
    states = [one for one in names(tmp_path) if one.endswith(".pt")]
    assert {f"{one}.sha256" for one in states} - set(sidecars) == {
        f"{one}.sha256" for one in links(tmp_path)
    }
    for one in sidecars:
        checked = subprocess.run(
            ["sha256sum", "--strict", "-c", Path(one).name],
            cwd=(tmp_path / one).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert checked.stdout == f"{Path(one).name.removesuffix('.sha256')}: OK\n"


def test_records_in_gzip_stay_in_gzip(reg: Registry, tmp_path: Path) -> None:
    tree, out, where = tmp_path / "in", tmp_path / "out", "phase1/checkpoints"
    (tree / where).mkdir(parents=True)
    about = dict.fromkeys(("float", "int", "format", "version", "settings"), "x")
    for step in (10_000, 20_000):
        file = tree / where / f"ckpt_phase1_step{step:08d}.mpk.gz"
        item = hydra_state(1, step, step / 10_000)
        formats.write(file, {"metadata": about, "item": item}, format="burn")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    run = reg.create_run("gz", preset=import_spec("hydra"))
    run.exchange.import_tree(tree)
    report = run.exchange.checkout(tree)
    assert report.left == {}
    assert report.written == [f"{where}/{name}.mpk.gz" for name in ("latest", "best")]
    run.exchange.push(hydra_state(1, 30_000, 3.0), step=30_000, phase="1")
    run.exchange.checkout(tree)
    run.exchange.checkout(out)
    assert names(out) == names(tree)
    assert {one.partition(".")[2] for one in names(out)} == {"mpk.gz", "mpk.gz.sha256"}
    for name in names(tree):
        if name.endswith(".gz"):
            assert gzip.decompress((out / name).read_bytes()) == gzip.decompress(
                (tree / name).read_bytes()
            )


def test_folders_of_the_hf_trainer_come_back(reg: Registry, tmp_path: Path) -> None:
    if "hf" not in NAMES.split(", "):
        pytest.skip("this build has no format for folders of Hugging Face")
    tree = tmp_path / "in"
    for step in (500, 1000):
        folder = tree / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "bert"}')
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        (folder / "vocab.txt").write_text("[PAD]\n")
    through(reg, tree, "hf", tmp_path / "out")
    assert names(tmp_path / "out") == names(tree)
    for name in names(tree):
        if name.endswith(".safetensors"):
            assert_same(load_file(tmp_path / "out" / name), load_file(tree / name))
