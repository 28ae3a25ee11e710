"""A checkout into a folder in which others work: updates, changed files, deaths, hostile names."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Run
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError
from holdfast.registry.face.registry import Registry
from holdfast.registry.layouts import import_spec, keep_checked_out, made
from holdfast.registry.loading.following import Patience, watching
from holdfast.registry.spec.presets import load_preset
from tests.registry.layouts.test_round_trips import (
    adr_state,
    adr_tree,
    hydra_run,
    hydra_state,
    links,
    names,
)
from tests.support.faults import Died

AWAY = "to have that of the run, move it away"


def save(run: Run, step: int, **more: Any) -> Any:
    state = {
        "step": step,
        **{part: torch.full((2,), float(step)) for part in ("weights", "m", "v")},
    }
    return run.exchange.push(state, step=step, **more)


@pytest.fixture
def andrea(reg: Registry) -> Run:
    run = reg.create_run("andrea", preset="andrea")
    save(run, 100)
    save(run, 200)
    return run


def test_second_checkout_writes_only_what_is_new(andrea: Run, tmp_path: Path) -> None:
    andrea.exchange.checkout(tmp_path)
    before = (tmp_path / "step_000100.bin").stat()
    save(andrea, 300)
    report = andrea.exchange.checkout(tmp_path)
    assert report.written == ["step_000300.bin"]
    assert sorted(report.kept) == ["step_000100.bin", "step_000200.bin"]
    assert (tmp_path / "step_000100.bin").stat() == before


def test_evicted_checkpoint_leaves_the_folder(andrea: Run, tmp_path: Path) -> None:
    andrea.exchange.checkout(tmp_path)
    andrea.retention.evict(andrea.checkpoints()[0], "not needed")
    assert andrea.exchange.checkout(tmp_path).removed == ["step_000100.bin"]
    assert names(tmp_path) == ["step_000200.bin"]


def test_a_folder_in_which_another_program_went_on_is_brought_up_to_date(
    reg: Registry, tmp_path: Path
) -> None:
    tree = adr_tree(tmp_path)  # ADR-004's class
    run = reg.create_run("adr", preset=import_spec("adr004"))
    run.exchange.import_tree(tree)
    theirs = {str(one.relative_to(tree)): one.read_bytes() for one in tree.rglob("*.pt")}
    run.exchange.push(adr_state(11), step=11, tier="training")
    for times in (1, 2):
        report = run.exchange.checkout(tree)
        named = [*(report.written if times == 1 else report.kept)]
        assert {"training/epoch_0011_step_00000011.pt", "training/latest.pt"} <= {*named}
        assert {*report.kept} >= {one for one in theirs if one.startswith(("mile", "training/ep"))}
        # The class's releases have other bytes than those of the run.
        assert report.left == {
            **{one: f"no checkout has made it; {AWAY}" for one in theirs if "/bayesian" in one},
            **{
                f"metadata/model_cards/v1.0.{n}.yaml": f"no checkout has made it; {AWAY}"
                for n in (0, 1)
            },
        }
        assert links(tree)["training/latest.pt"] == "epoch_0011_step_00000011.pt"
    (gone,) = [one for one in run.checkpoints() if one.step == 8]
    run.retention.evict(gone, "not needed")
    report = run.exchange.checkout(tree)
    left = "training/epoch_0008_step_00008000.pt"
    assert report.left[left] == "the run no longer has it, and another program made it"
    assert left not in run.exchange.checkout(tree).left
    for name, data in theirs.items():
        if not name.endswith("latest.pt"):
            assert (tree / name).read_bytes() == data
    (tree / "training/latest.pt").unlink()
    (tree / "training/latest.pt").symlink_to("epoch_0012_step_00000012.pt.tmp")
    (tree / "training/epoch_0012_step_00000012.pt.tmp").write_bytes(b"not yet taken in")
    assert "training/latest.pt" in run.exchange.checkout(tree).left


@pytest.mark.parametrize("preset", ["andrea", "hydra"])
def test_every_name_and_every_byte_is_durable(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """What a sync has seen of a file or a folder survives a loss of power."""
    names, files, fsync = dict[int, set[str]](), set[int](), os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = set(os.listdir(fd))
        else:
            files.add(found.st_ino)

    if preset == "hydra":
        run = hydra_run(reg)
    else:
        run = reg.create_run("run", preset=preset)
        save(run, 100)
        save(run, 200)
    monkeypatch.setattr(os, "fsync", note)
    root = tmp_path / "new" / "deep"
    run.exchange.checkout(root)
    every = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(every) > 6
    for one in every:
        if one.name not in ("lock", "unfinished"):
            assert one.name in names.get(one.parent.stat().st_ino, ()), one
        if one.is_file() and not one.is_symlink() and one.name != "lock":
            assert one.stat().st_ino in files, one
    gone = run.checkpoints()[0]
    run.retention.evict(gone, "not needed")
    for path in run.exchange.checkout(root).removed:
        assert Path(path).name not in names.get((root / path).parent.stat().st_ino, ())


def test_changed_file_is_left_and_told(andrea: Run, tmp_path: Path) -> None:
    andrea.exchange.checkout(tmp_path)
    (tmp_path / "step_000100.bin").write_bytes(b"mine")
    andrea.retention.evict(andrea.checkpoints()[0], "not needed")
    report = andrea.exchange.checkout(tmp_path)
    assert list(report.left) == ["step_000100.bin"]
    assert (tmp_path / "step_000100.bin").read_bytes() == b"mine"


def test_changed_file_is_not_replaced(andrea: Run, tmp_path: Path) -> None:
    andrea.streams["loss"].append([{"step": 1, "loss": 1.0}])
    andrea.exchange.checkout(tmp_path)
    (tmp_path / "run.loss.json").write_text("mine")
    andrea.streams["loss"].append([{"step": 2, "loss": 1.0}])
    assert andrea.exchange.checkout(tmp_path).left == {"run.loss.json": f"it was changed; {AWAY}"}
    assert (tmp_path / "run.loss.json").read_text() == "mine"


def test_a_file_whose_keys_the_commit_has_is_written_again_for_another_commit(
    reg: Registry, tmp_path: Path
) -> None:
    run = reg.create_run("r", preset=load_preset("hydra").changed(transitions=()))
    first = run.save(hydra_state(1, 10, 3.0), step=10, phase=1)
    second = run.save(hydra_state(1, 20, 4.0), step=20, phase=1)
    run.exchange.checkout(tmp_path)
    run.restore(at=first)
    again = run.save(hydra_state(1, 20, 4.0) | {"timestamp": 7}, step=20, phase=1)
    assert again.digest == second.digest
    path = "phase1/checkpoints/ckpt_phase1_step00000020.pt"
    assert path in run.exchange.checkout(tmp_path).written
    assert torch.load(tmp_path / path, weights_only=True)["timestamp"] == 7


def test_files_of_others_stay(andrea: Run, tmp_path: Path) -> None:
    (tmp_path / "step_000100.bin").write_bytes(b"theirs")
    (tmp_path / "notes.txt").touch()
    assert andrea.exchange.checkout(tmp_path).left == {
        "step_000100.bin": f"no checkout has made it; {AWAY}"
    }
    assert (tmp_path / "step_000100.bin").read_bytes() == b"theirs"
    assert (tmp_path / "notes.txt").exists()


def test_empty_folders_at_the_names_of_files_stay(reg: Registry, tmp_path: Path) -> None:
    run = hydra_run(reg)
    run.exchange.checkout(tmp_path / "whole")
    state = "phase1/checkpoints/ckpt_phase1_step00020000.pt"
    taken = [state, "gates/bc_best.pt.sha256", "phase1/checkpoints/latest.pt"]
    for name in taken:
        (tmp_path / "out" / name).mkdir(parents=True)
    report = run.exchange.checkout(tmp_path / "out")
    assert report.left == dict.fromkeys(taken, "it is a folder")
    assert set(report.written) >= set(names(tmp_path / "whole")) - {*taken, f"{state}.sha256"}
    assert not list((tmp_path / "out" / ".holdfast-checkout").rglob("state"))


def test_folder_of_another_run_is_refused(reg: Registry, andrea: Run, tmp_path: Path) -> None:
    andrea.exchange.checkout(tmp_path)
    other = reg.create_run("other", preset="andrea")
    with pytest.raises(Conflict, match="checkout of something else"):
        other.exchange.checkout(tmp_path)


def test_nothing_is_removed_or_made_through_a_link(reg: Registry, tmp_path: Path) -> None:
    run, out = hydra_run(reg), tmp_path / "tree"
    run.exchange.checkout(out)
    moved = tmp_path / "elsewhere"
    (out / "phase1").rename(moved)
    (out / "phase1").symlink_to(moved)
    before = sorted(one.name for one in moved.rglob("*"))
    other = tmp_path / "lock"
    (out / ".holdfast-checkout/lock").unlink()
    (out / ".holdfast-checkout/lock").symlink_to(other)
    with suppress(RegistryError):
        run.exchange.checkout(out)
    assert not other.exists()
    (out / ".holdfast-checkout/lock").unlink()
    for checkpoint in run.checkpoints():
        with suppress(RegistryError):
            run.retention.evict(checkpoint, "old")
    gone = [one.handle.record.phase for one in run.retention.evicted()]
    assert "1" in gone
    with suppress(RegistryError):
        run.exchange.checkout(out)
    assert sorted(one.name for one in moved.rglob("*")) == before


def test_file_and_folder_that_is_a_link_are_refused(reg: Registry, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/gates").symlink_to(tmp_path / "elsewhere")
    run = hydra_run(reg)
    with pytest.raises(InvalidInput, match="something else"):
        run.exchange.checkout(tmp_path / "tree")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match="not a folder"):
        run.exchange.checkout(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_checkout_shares_no_file_with_the_registry_or_itself(reg: Registry, tmp_path: Path) -> None:
    hydra_run(reg).exchange.checkout(tmp_path)
    gate = tmp_path / "gates/bc_best.pt"
    source = tmp_path / "phase1/checkpoints/ckpt_phase1_step00020000.pt"
    assert gate.read_bytes() == source.read_bytes()
    assert not gate.is_symlink()
    assert {(tmp_path / one).stat(follow_symlinks=False).st_nlink for one in names(tmp_path)} == {1}


def test_a_file_that_was_edited_is_never_copied(reg: Registry, tmp_path: Path) -> None:
    """A gate is copied from the checkpoint of its content, but only from what a checkout made."""
    run = hydra_run(reg)
    run.exchange.checkout(tmp_path)
    gate = tmp_path / "gates/bc_best.pt"
    right = gate.read_bytes()
    gate.unlink()
    source = tmp_path / "phase1/checkpoints/ckpt_phase1_step00020000.pt"
    source.write_bytes(b"mine")
    report = run.exchange.checkout(tmp_path)
    assert report.left == {str(source.relative_to(tmp_path)): f"it was changed; {AWAY}"}
    assert gate.read_bytes() == right


def test_links_move_with_the_run(reg: Registry, tmp_path: Path) -> None:
    run = hydra_run(reg)
    run.exchange.checkout(tmp_path)
    latest = "phase3/checkpoints/latest.pt"
    assert links(tmp_path)[latest] == "ckpt_phase3_step00041000.pt"
    run.checkpoints(3)[1].report({"mu": 40.0})
    run.exchange.checkout(tmp_path)
    assert links(tmp_path)["phase3/checkpoints/best.pt"] == "ckpt_phase3_step00041000.pt"
    assert all((tmp_path / one).exists() for one in links(tmp_path))


def test_death_at_any_step_leaves_whole_files_that_the_next_checkout_knows(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, number = hydra_run(reg), 0
    run.exchange.checkout(tmp_path / "right")
    want = {one: (tmp_path / "right" / one).read_bytes() for one in names(tmp_path / "right")}
    real_note, real_replace = made.Made.note, Path.replace
    calls = 0

    def dying(real: Any) -> Any:
        def act(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Died
            return real(*given)

        return act

    monkeypatch.setattr(made.Made, "note", dying(real_note))
    monkeypatch.setattr(Path, "replace", dying(real_replace))
    died = True
    while died:
        number, calls, died = number + 1 if number < 12 else number + 9, 0, False
        out = tmp_path / f"out{number}"
        try:
            run.exchange.checkout(out)
        except Died:
            died = True
        for one in names(out):
            assert (out / one).read_bytes() == want[one]  # also through links: none dangles
        number, kept = -1, number
        assert run.exchange.checkout(out).left == {}
        assert {one: (out / one).read_bytes() for one in names(out)} == want
        number = kept


def test_death_while_a_file_is_replaced(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    andrea.streams["loss"].append([{"step": 1, "loss": 1.0}])
    andrea.exchange.checkout(tmp_path)
    andrea.streams["loss"].append([{"step": 2, "loss": 1.0}])

    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == "run.loss.json":
            raise Died
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Died):
            andrea.exchange.checkout(tmp_path)
    assert '"step": 2' not in (tmp_path / "run.loss.json").read_text()
    assert andrea.exchange.checkout(tmp_path).left == {}
    assert '"step": 2' in (tmp_path / "run.loss.json").read_text()


@pytest.mark.parametrize(
    "pattern",
    ["../{name}.pt", "/tmp/{name}.pt", "gates/../../{name}", "con/{name}", "{name.__class__}"],
)
def test_hostile_names_of_a_preset_write_nothing(
    reg: Registry, tmp_path: Path, pattern: str
) -> None:
    spec = load_preset("hydra").changed(layout={"gate": pattern}, transitions=())
    run = reg.create_run("hostile", preset=spec)
    run.exchange.push(hydra_state(1, 1, 1.0), step=1, phase=1, metrics={"heldout_ce": 1.0})
    run.pins.gates.set("bc_best")
    with pytest.raises(InvalidInput):
        run.exchange.checkout(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hostile_note_of_an_import_writes_nothing(reg: Registry, tmp_path: Path) -> None:
    run = reg.create_run("hostile", preset=None)
    for step, name in ((1, "a.thalia"), (2, "A.thalia")):
        run.exchange.push(
            {"regions": {}, "pathways": {}}, step=step,
            meta={"import": {"layout": "thalia", "file": name, "sha256": ""}},
        )  # fmt: skip
    with pytest.raises(InvalidInput, match="one file on some systems"):
        run.exchange.checkout(tmp_path / "out", layout="thalia")
    assert not (tmp_path / "out").exists()


def test_follower_writes_each_change_until_the_run_is_over(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = iter(
        [lambda: save(andrea, 300), lambda: None, lambda: setattr(andrea, "status", "completed")]
    )
    monkeypatch.setattr(watching, "_sleep", lambda _: next(acts)())
    reports = list(keep_checked_out(andrea.handle.committer, tmp_path, None, Patience()))
    assert [one.written for one in reports] == [
        ["step_000100.bin", "step_000200.bin"], ["step_000300.bin"], [],
    ]  # fmt: skip


def test_notes_of_another_form_are_refused(reg: Registry, tmp_path: Path) -> None:
    run = hydra_run(reg)
    run.exchange.checkout(tmp_path)
    notes = tmp_path / ".holdfast-checkout/made.jsonl"
    sound = notes.read_text()
    for field in ("key", "sha256", "target", "before"):
        file = {"key": "x", "sha256": "", "target": "", "stamp": [], field: 5}
        for path in ("gates/bc_best.pt", "phase1/checkpoints/latest.pt"):
            notes.write_text(f"{sound}{json.dumps({'path': path, 'made': file})}\n")
            with pytest.raises(InvalidInput, match="the notes of the checkout are damaged"):
                run.exchange.checkout(tmp_path)


def test_two_checkouts_at_once_are_refused(andrea: Run, tmp_path: Path) -> None:
    notes = made.Made(tmp_path, "andrea", "andrea")
    with notes.locked(), pytest.raises(Conflict, match="another checkout"):
        andrea.exchange.checkout(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [made.FOLDER]
