"""Folders that programs write: verified, each file once, through deaths, hostile names refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Run, formats
from holdfast.formats import thalia
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face.exchange import RunExchange
from holdfast.registry.face.registry import Registry
from holdfast.registry.layouts import import_spec
from holdfast.registry.layouts.importing import Importer
from holdfast.registry.loading.following import watching
from tests.registry.layouts.test_round_trips import adr_tree, hydra_run, hydra_state
from tests.support.commands import invoke
from tests.support.loads import steps

PARAMETERS = 4


def step_file(step: int) -> bytes:
    return struct.pack(f"<ii{3 * PARAMETERS}f", step, PARAMETERS, *range(3 * PARAMETERS))


def write_step(folder: Path, step: int) -> None:
    (folder / f"step_{step:06d}.bin").write_bytes(step_file(step))


def outcomes(reports: Any) -> dict[str, str]:
    return {one.path: one.outcome for one in reports}


@pytest.fixture
def andrea(reg: Registry) -> Run:
    return reg.create_run("andrea", preset=import_spec("andrea"))


@pytest.fixture
def hydra(reg: Registry, tmp_path: Path) -> Path:
    """The tree of a run of Hydra."""
    hydra_run(reg, "source").exchange.checkout(tmp_path / "tree")
    return tmp_path / "tree"


def test_file_that_its_sidecar_denies_is_refused_and_no_other(reg: Registry, hydra: Path) -> None:
    bad = hydra / "phase1/checkpoints/ckpt_phase1_step00010000.pt"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    run = reg.create_run("into", preset=import_spec("hydra"))
    reports = {one.path: one for one in run.exchange.import_tree(hydra)}
    name = str(bad.relative_to(hydra))
    assert reports[name].outcome == "refused"
    assert "do not have the digest of its .sha256" in reports[name].why
    assert [one for one, report in reports.items() if report.outcome == "refused"] == [name]
    assert steps(run) == [20_000, 30_000, 30_500, 31_000, 40_500, 41_000]


@pytest.mark.parametrize("text", ["", "00  other.pt", f"{'0' * 64}  ../x.pt\n"])
def test_malformed_sidecar_refuses_its_file(reg: Registry, hydra: Path, text: str) -> None:
    (hydra / "gates/bc_best.pt.sha256").write_text(text)
    run = reg.create_run("into", preset=import_spec("hydra"))
    assert outcomes(run.exchange.import_tree(hydra))["gates/bc_best.pt"] == "refused"


def test_missing_sidecar_is_a_warning(reg: Registry, hydra: Path) -> None:
    (hydra / "gates/bc_best.pt.sha256").unlink()
    run = reg.create_run("into", preset=import_spec("hydra"))
    (gate,) = (
        one for one in run.exchange.import_tree(hydra) if one.kind == "gate" and one.warnings
    )
    assert (gate.path, gate.outcome) == ("gates/bc_best.pt", "imported")
    assert "no .sha256" in gate.warnings[0]


def test_best_and_gates_are_those_of_the_tree(reg: Registry, hydra: Path) -> None:
    run = reg.create_run("into", preset=import_spec("hydra"))
    run.exchange.import_tree(hydra)
    assert run.best(1).step == run.pins.gates.get("bc_best").step == 20_000  # type: ignore[union-attr]
    assert run.best(3).step == 40_500  # type: ignore[union-attr]
    (first, _) = run.pool.roster()
    assert (first.version, first.step, first.mu) == (1, 40_500, 27.0)
    assert list(first.load()) == ["model_record"]
    run.restore()
    run.save(hydra_state(3, 41_500, 1.5), step=41_500)
    assert [one.version for one in run.pool.roster()] == [1, 2, 3]


def test_record_without_names_and_another_model_of_a_version_are_refused(
    reg: Registry, hydra: Path
) -> None:
    run = reg.create_run("into", preset=import_spec("hydra"))
    run.exchange.import_tree(hydra)
    texts = [b"f32", b"i32", b"burn_core::record::file::BinFileRecorder<Full>", b"0.20.0", b"Full"]
    name, model = "ckpt_phase3_step00042000.bin", "phase3/opponent_pool/pool_v0002_step00041000.pt"
    (hydra / "phase3/checkpoints" / name).write_bytes(
        b"".join(bytes([len(one)]) + one for one in texts)
    )
    torch.save({"model_record": {"w": torch.zeros(4, dtype=torch.bfloat16)}}, hydra / model)
    (hydra / f"{model}.sha256").unlink()
    refused = {one.path: one.why for one in run.exchange.import_tree(hydra)
               if one.outcome == "refused"}  # fmt: skip
    assert list(refused) == [f"phase3/checkpoints/{name}", model]
    assert "NamedMpkFileRecorder" in refused[f"phase3/checkpoints/{name}"]
    assert "has given this version to another model" in refused[model]


@pytest.mark.parametrize(
    ("about", "name", "found"),
    [
        ({"games_played": 10**400, "win_rate": 0.5}, "", "games_played"),
        ({"games_played": 2, "win_rate": 1.5}, "", "win_rate"),
        ({"mu": "x"}, "", "not a finite number"),
        ({"sigma": 0}, "", "not an uncertainty"),
        ({"phase": [1]}, "", "not a legal name"),
        ({"phase": "7"}, "", "no such phase"),
        ({"version": 2}, "", "not the version"),
        ({}, f"pool_v{10**17}_step00000001", "not the version"),
        ({}, f"pool_v0001_step{10**17}", "not a step"),
    ],
)
def test_hostile_metadata_of_a_model_is_refused(
    reg: Registry, tmp_path: Path, about: Any, name: str, found: str
) -> None:
    folder = tmp_path / "phase3/opponent_pool"
    folder.mkdir(parents=True)
    name = name or "pool_v0001_step00000001"
    torch.save({"model_record": {"w": torch.zeros(2)}}, folder / f"{name}.pt")
    (folder / f"{name}.meta.json").write_text(json.dumps(about))
    (tmp_path / ".holdfast-checkout").mkdir()
    head = {"format": "holdfast.checkout/1", "run": "into", "layout": "hydra"}
    note = {"path": "x", "made": {"key": 5, "sha256": 5, "target": "", "stamp": [1]}}
    lines = "".join(f"{json.dumps(one)}\n" for one in (head, note))
    (tmp_path / ".holdfast-checkout/made.jsonl").write_text(lines)
    run = reg.create_run("into", preset=import_spec("hydra"))
    (one,) = run.exchange.import_tree(tmp_path)
    assert one.outcome == "refused"
    assert found in one.why
    assert run.pool.entries() == []


def test_gate_alone_does_not_become_latest(reg: Registry, hydra: Path) -> None:
    for one in hydra.glob("phase1/checkpoints/*step00020000*"):
        one.unlink()
    (hydra / "phase1/checkpoints/best.pt").unlink()
    run = reg.create_run("into", preset=import_spec("hydra"))
    run.exchange.import_tree(hydra)
    assert run.latest(1).step == 30_000  # type: ignore[union-attr]
    assert run.pins.gates.get("bc_best").step == 20_000


def test_dry_run_says_the_same_and_commits_nothing(reg: Registry, hydra: Path) -> None:
    (hydra / "gates/distill_best.pt.sha256").write_text("")
    run = reg.create_run("into", preset=import_spec("hydra"))
    before = run.manifest.next_slot
    dry = run.exchange.import_tree(hydra, dry_run=True)
    assert run.refresh().manifest.next_slot == before
    done = run.exchange.import_tree(hydra)
    assert outcomes(dry) == outcomes(done)
    assert {one.path: (one.kind, one.ref) for one in dry} == {
        one.path: (one.kind, one.ref) for one in done
    }


def test_second_import_takes_only_what_is_new(andrea: Run, tmp_path: Path) -> None:
    write_step(tmp_path, 100)
    andrea.exchange.import_tree(tmp_path)
    write_step(tmp_path, 200)
    assert outcomes(andrea.exchange.import_tree(tmp_path)) == {
        "step_000100.bin": "there already",
        "step_000200.bin": "imported",
    }


def test_evicted_file_is_not_taken_in_again(andrea: Run, tmp_path: Path) -> None:
    write_step(tmp_path, 100)
    write_step(tmp_path, 200)
    andrea.exchange.import_tree(tmp_path)
    andrea.retention.evict(andrea.checkpoints()[0], "not needed")
    assert outcomes(andrea.exchange.import_tree(tmp_path))["step_000100.bin"] == "there already"
    assert steps(andrea) == [200]


def test_header_counts_and_a_wrong_name_is_told(andrea: Run, tmp_path: Path) -> None:
    (tmp_path / "step_000100.bin").write_bytes(step_file(150))
    (one,) = andrea.exchange.import_tree(tmp_path)
    assert one.warnings == ("its name says step 100, its header 150",)
    assert steps(andrea) == [150]


def test_steps_are_ordered_by_number(andrea: Run, tmp_path: Path) -> None:
    for step in (999_900, 1_000_000, 200):
        write_step(tmp_path, step)
    andrea.exchange.import_tree(tmp_path)
    assert steps(andrea) == [200, 999_900, 1_000_000]


def test_table_names_the_parameters(andrea: Run, tmp_path: Path) -> None:
    write_step(tmp_path, 100)
    (tmp_path / "table").write_text('{"wte": [2, 1], "head": [2]}')
    andrea.exchange.import_tree(tmp_path, table=tmp_path / "table")
    assert list(andrea.checkpoints()[0].load()["weights"]) == ["wte", "head"]


def test_histories_are_continued_and_reset(andrea: Run, tmp_path: Path) -> None:
    write_step(tmp_path, 100)
    loss, samples = tmp_path / "run.loss.json", tmp_path / "run.samples.json"
    loss.write_text('[{"step": 1, "loss": 2.5}]')
    samples.write_text('[{"step": 100, "text": "a"}]')
    andrea.exchange.import_tree(tmp_path)
    loss.write_text('[{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]')
    samples.write_text('[{"step": 200, "text": "b"}]')  # a pivot has archived the others
    write_step(tmp_path, 200)
    andrea.exchange.import_tree(tmp_path)
    assert [one["loss"] for one in andrea.streams["loss"].read()] == [2.5, 2.25]
    assert [one["text"] for one in andrea.streams["samples"].read()] == ["b"]
    assert andrea.streams["samples"].archives == {"import-1": 1}
    loss.write_text('[{"step": 2, "loss": 0.5}]')  # nobody may rewrite the history of losses
    assert outcomes(andrea.exchange.import_tree(tmp_path))["run.loss.json"] == "refused"


@pytest.mark.parametrize("target", ["/etc/passwd", "../step_000100.bin", "nothing", "loop"])
def test_links_elsewhere_are_refused(andrea: Run, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_step(tmp_path, 100)
    (folder / "step_000100.bin").symlink_to(target)
    (folder / "loop").symlink_to("loop")
    assert set(outcomes(andrea.exchange.import_tree(folder)).values()) == {"refused"}
    assert steps(andrea) == []


def test_names_that_differ_in_case_are_refused(andrea: Run, tmp_path: Path) -> None:
    for name in ("run.loss.json", "RUN.loss.json"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(InvalidInput, match="one file on some systems"):
        andrea.exchange.import_tree(tmp_path)


def test_unsafe_names_are_refused_and_the_others_taken(andrea: Run, tmp_path: Path) -> None:
    write_step(tmp_path, 100)
    for name in (b"con", b"a\\b", b"new\nline", b"\xff"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).touch()
    found = outcomes(andrea.exchange.import_tree(tmp_path))
    assert sorted(found.values()) == ["imported", *["refused"] * 4]


class Clock:
    """Time that passes only when the follower sleeps; each sleep does the next act."""

    def __init__(self, patch: pytest.MonkeyPatch, acts: list[Any]) -> None:
        self._now, self._acts = 0.0, iter(acts)
        patch.setattr(watching, "_monotonic", lambda: self._now)
        patch.setattr(watching, "_sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self._now += max(seconds, 0.1)
        next(self._acts, lambda: None)()


def followed(run: Run, folder: Path, layout: str = "andrea") -> Iterator[str]:
    for one in run.exchange.watch_folder(folder, layout=layout, quiet_s=60, timeout_s=600):
        yield f"{one.outcome} {one.path}"


def test_step_file_is_taken_once_it_has_its_size(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "step_000100.bin", step_file(100)
    seen: list[list[int]] = []
    acts = [
        lambda: path.write_bytes(data[:4]),
        lambda: seen.append(steps(andrea)) or path.write_bytes(data[:-1]),  # type: ignore[func-returns-value]
        lambda: seen.append(steps(andrea)) or path.write_bytes(data),  # type: ignore[func-returns-value]
        lambda: seen.append(steps(andrea)),
    ]
    Clock(monkeypatch, acts)
    assert list(followed(andrea, tmp_path)) == ["imported step_000100.bin"]
    assert seen == [[], [], [100]]


def test_file_that_cannot_tell_is_taken_after_quiet_time(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.loss.json"
    path.write_text('[{"step": 1')
    write_step(tmp_path, 1)
    Clock(monkeypatch, [lambda: path.write_text('[{"step": 1, "loss": 2.0}]')])
    taken = ["imported step_000001.bin", "imported run.loss.json"]
    assert list(followed(andrea, tmp_path)) == taken
    assert andrea.streams["loss"].count == 1


def test_renamed_file_is_taken_and_the_unfinished_one_is_not(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reg.create_run("hydra", preset=import_spec("hydra"))
    folder = tmp_path / "phase1/checkpoints"
    folder.mkdir(parents=True)
    name = "ckpt_phase1_step00000007.pt"
    torch.save(hydra_state(1, 7, 1.0), folder / f"{name}.tmp")
    Clock(monkeypatch, [lambda: None, lambda: (folder / f"{name}.tmp").rename(folder / name)])
    assert list(followed(run, tmp_path, "hydra")) == [f"imported phase1/checkpoints/{name}"]


def test_restarted_follower_takes_nothing_twice(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 100)
    Clock(monkeypatch, [])
    assert next(followed(andrea, tmp_path)) == "imported step_000100.bin"
    write_step(tmp_path, 200)
    assert list(followed(andrea, tmp_path)) == ["imported step_000200.bin"]
    assert andrea.manifest.count == 2


def test_newest_checkpoint_waits_for_the_files_that_come_after_it(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of ADR-004 writes a milestone, and that of Hydra a sidecar, after a file."""
    adr, tree = adr_tree(tmp_path / "adr"), tmp_path / "tree"
    late = ["epoch_0010.pt", "best_loss_0.1111_epoch_0009.pt", "best_accuracy_0.9090_epoch_0009.pt"]
    (tree / "training").mkdir(parents=True)
    (tree / "milestones").mkdir()

    def move(*names: str) -> None:
        for name in names:
            (adr / name).rename(tree / name)

    Clock(
        monkeypatch,
        [
            lambda: move("training/epoch_0009_step_00009000.pt"),
            lambda: move(*(f"milestones/{name}" for name in late[1:])),
            lambda: move("training/epoch_0010_step_00010000.pt"),
            lambda: move(f"milestones/{late[0]}"),
        ],
    )
    run = reg.create_run("adr", preset=import_spec("adr004"))
    taken = list(followed(run, tree, "adr004"))
    assert sorted(taken) == sorted(
        f"imported {path.relative_to(tree)}" for path in tree.rglob("*.pt")
    )
    assert run.latest().companions.keys() == {"milestone"}  # type: ignore[union-attr]

    folder = tmp_path / "phase1/checkpoints"
    folder.mkdir(parents=True)
    older, newer = (folder / f"ckpt_phase1_step{step:08d}.pt" for step in (7, 8))
    sidecar = folder / f"{older.name}.sha256"

    def write_sidecar(to: int | None) -> None:
        line = f"{hashlib.sha256(older.read_bytes()).hexdigest()}  {older.name}\n"
        sidecar.write_text(line[:to])

    Clock(
        monkeypatch,
        [
            lambda: torch.save(hydra_state(1, 8, 1.0), newer),  # its sidecar never comes
            lambda: torch.save(hydra_state(1, 7, 1.0), older),
            lambda: write_sidecar(20),
            lambda: write_sidecar(None),
        ],
    )
    hydra = reg.create_run("hydra", preset=import_spec("hydra"))
    reports = hydra.exchange.watch_folder(tmp_path, layout="hydra", quiet_s=60, timeout_s=600)
    assert {one.path: (one.outcome, bool(one.warnings)) for one in reports} == {
        f"phase1/checkpoints/{older.name}": ("imported", False),
        f"phase1/checkpoints/{newer.name}": ("imported", True),
    }


def test_models_of_a_pool_are_taken_in_the_order_of_their_versions(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "phase3/opponent_pool"
    folder.mkdir(parents=True)

    def write(version: int) -> Path:
        path = folder / f"pool_v{version:04d}_step{version:08d}.pt"
        torch.save({"model_record": {"w": torch.ones(2) * version}}, path)
        line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        path.with_name(f"{path.name}.sha256").write_text(line)
        return path

    def describe(path: Path, mu: float) -> None:
        path.with_name(f"{path.stem}.meta.json").write_text(json.dumps({"mu": mu}))

    first = write(1)
    describe(write(2), 22.0)
    Clock(monkeypatch, [lambda: None, lambda: None, lambda: describe(first, 21.0)])
    run = reg.create_run("league", preset=import_spec("hydra"))
    assert list(followed(run, tmp_path, "hydra")) == [
        "imported phase3/opponent_pool/pool_v0001_step00000001.pt",
        "imported phase3/opponent_pool/pool_v0002_step00000002.pt",
    ]
    assert [(one.version, one.mu) for one in run.pool.roster()] == [(1, 21.0), (2, 22.0)]


def test_companion_that_comes_too_late_is_refused(reg: Registry, tmp_path: Path) -> None:
    tree = adr_tree(tmp_path / "adr")
    late = tree / "milestones/best_accuracy_0.9090_epoch_0009.pt"
    content = late.read_bytes()
    late.unlink()
    run = reg.create_run("adr", preset=import_spec("adr004"))
    first = {one.path: (one.outcome, one.kind) for one in run.exchange.import_tree(tree)}
    assert first["milestones/best_loss_0.1111_epoch_0009.pt"] == ("imported", "companion")
    assert first["metadata/model_cards/v1.0.1.yaml"] == ("imported", "card")
    late.write_bytes(content)
    (tree / "milestones/best_accuracy_0.5_epoch_0009.pt").write_bytes(content)
    second = {one.path: one for one in run.exchange.import_tree(tree)}
    assert second["milestones/best_loss_0.1111_epoch_0009.pt"].outcome == "there already"
    told = [path for path, one in second.items() if one.outcome in ("refused", "passed over")]
    assert set(told) >= {
        f"milestones/best_accuracy_{value}_epoch_0009.pt" for value in ("0.9090", "0.5")
    }
    assert any("by `holdfast push FILE RUN --artifact" in one.why for one in second.values())
    # The remedy that the reason names; also of one whose training file the class has removed.
    (tree / "training/epoch_0009_step_00009000.pt").unlink()
    while refused := [one for one in run.exchange.import_tree(tree) if one.outcome == "refused"]:
        assert "`holdfast push FILE RUN --artifact" in refused[0].why
        late = tree / refused[0].path
        run.pins.artifacts.set(late.stem, formats.read(late).state)
        late.unlink()
    assert {*run.pins.artifacts.list()} == {Path(path).stem for path in told}
    assert {one.outcome for one in run.exchange.import_tree(tree)} == {"there already"}


def test_brains_without_numbers_are_taken_in_behind_those_before(
    reg: Registry, tmp_path: Path
) -> None:
    def write(name: str, number: float) -> None:
        state = {"regions": {"a": {"weights": {"w": torch.tensor([number])}}}, "pathways": {}}
        formats.write(tmp_path / name, {**state, "config": {}})

    run = reg.create_run("brains", preset=import_spec("thalia"))
    write("b.thalia", 1)
    write("stage4.thalia", 2)
    assert set(outcomes(run.exchange.import_tree(tmp_path)).values()) == {"imported"}
    write("a.thalia", 3)
    assert outcomes(run.exchange.import_tree(tmp_path))["a.thalia"] == "imported"
    assert steps(run) == [4, 5, 6]


def test_a_delta_of_thalia_is_taken_once_it_has_its_metadata(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reg.create_run("brains", preset=import_spec("thalia"))
    state = {"regions": {"a": {"weights": {"w": torch.ones(3)}}}, "pathways": {}, "config": {}}
    base, link = tmp_path / "stage1.thalia", tmp_path / "stage2.delta.thalia"
    thalia.save(base, state)
    thalia.save_delta(link, {**state, "theta": {"phase": 1}}, base)
    data = link.read_bytes()
    link.unlink()
    seen: list[list[int]] = []
    parts = [data[:8], data[:80], data[:-1], data]
    acts = [lambda part=part: seen.append(steps(run)) or link.write_bytes(part) for part in parts]
    Clock(monkeypatch, acts)
    taken = ["imported stage1.thalia", "imported stage2.delta.thalia"]
    assert list(followed(run, tmp_path, "thalia")) == taken
    assert seen == [[1]] * 4


_PROGRAM = """
import os, signal, sys
import holdfast
from holdfast.registry.layouts import importing
real = importing.Importer._save
def save(*given):
    made = real(*given)
    if made[1].step == 300:
        os.kill(os.getpid(), signal.SIGKILL)
    return made
importing.Importer._save = save
holdfast.open(sys.argv[1]).run("r").exchange.import_tree(sys.argv[2])
"""


def test_killed_import_is_continued_exactly_once(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for step in range(100, 600, 100):
        write_step(folder, step)
    run = holdfast.init(str(tmp_path / "reg")).create_run("r", preset=import_spec("andrea"))
    killed = subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path / "reg", folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    found = outcomes(run.refresh().exchange.import_tree(folder))
    assert list(found.values()) == ["there already"] * 3 + ["imported"] * 2
    assert steps(run) == [100, 200, 300, 400, 500]
    assert run.manifest.count == 5


def test_file_that_changes_while_it_is_read_is_refused(
    andrea: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 100)
    real = Importer._digest

    def digest(self: Importer, path: str) -> Any:
        found = real(self, path)
        if path == "step_000100.bin":
            monkeypatch.setattr(Importer, "_digest", real)
            (tmp_path / "step_000100.bin").write_bytes(step_file(100)[:-4] + b"\1\1\1\1")
        return found

    monkeypatch.setattr(Importer, "_digest", digest)
    assert outcomes(andrea.exchange.import_tree(tmp_path)) == {"step_000100.bin": "refused"}
    assert steps(andrea) == []


def test_following_commands_print_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that follows something says at once what it did, for a program too."""
    url = tmp_path / "reg"
    with holdfast.init(str(url)) as made, made.create_run("r", preset="andrea") as run:
        folder = tmp_path / "in"
        folder.mkdir()
        write_step(folder, 100)
        (folder / "odd.txt").write_text("")
        run.exchange.import_tree(folder)
    monkeypatch.setattr(
        RunExchange, "watch_folder", lambda self, *_, **__: iter(self.import_tree(folder))
    )
    come = invoke("push", folder, "r", "--layout", "andrea", "--watch", "--json", "-r", url)
    lines = [json.loads(line) for line in come.stdout.splitlines()]
    assert [one["outcome"] for one in lines] == ["there already", "passed over"]
    assert come.exit_code == 0
    target = tmp_path / "out"
    gone = invoke(
        "pull", "r", "--to", target, "--layout", "preset", "--watch", "--json", "-r", url
    )  # the run is completed
    (line,) = [json.loads(line) for line in gone.stdout.splitlines()]
    assert line == {"written": ["step_000100.bin"], "kept": [], "removed": [], "left": {}}


def test_commands(tmp_path: Path) -> None:
    folder, url = tmp_path / "my-run", tmp_path / "reg"
    folder.mkdir()
    write_step(folder, 100)
    holdfast.init(str(url))
    dry = invoke("push", folder, "--layout", "andrea", "--dry-run", "-r", url)
    assert dry.stdout == "would import: step_000100.bin as my-run/main/step00000100\n"
    assert holdfast.open(str(url)).run_names() == []
    done = invoke("push", folder, "--layout", "andrea", "-r", url)
    assert done.stdout == "imported: step_000100.bin as my-run/main/step00000100\n"
    out = invoke("pull", "my-run", "--to", tmp_path / "out", "--layout", "preset", "-r", url)
    assert out.stdout == "wrote: step_000100.bin\n"
    (tmp_path / "out/step_000100.bin").unlink()
    (tmp_path / "out/step_000100.bin").touch()
    again = invoke("pull", "my-run", "--to", tmp_path / "out", "--layout", "andrea", "-r", url)
    assert (again.exit_code, "left alone: step_000100.bin" in again.stderr) == (5, True)
    model = tmp_path / "model.onnx"
    model.write_bytes(b"\x08\x08")
    for file, status, text in ((model, 8, "ONNX is out of scope"), (url / "x", 3, "not a folder")):
        wrong = invoke("push", file, "other", "--layout", "andrea", "-r", url)
        assert (wrong.exit_code, text in wrong.stderr) == (status, True)
    assert holdfast.open(str(url)).run_names() == ["my-run"]  # none was created for them
    (folder / "step_000200.bin").write_bytes(b"short")
    bad = invoke("push", folder, "--layout", "andrea", "-r", url, "--json")
    assert (bad.exit_code, '"refused"' in bad.stdout) == (3, True)
