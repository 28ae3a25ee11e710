"""Histories beside step files: entries come with their checkpoints, and a folder may go back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Registry, Run
from holdfast.registry.errors import Conflict
from holdfast.registry.layouts import import_spec
from holdfast.registry.layouts.importing import Importer
from tests.registry.layouts.followed import CADENCE, Writer, check_line
from tests.registry.layouts.test_importing import Clock, followed, outcomes
from tests.support.loads import steps

Loss = dict[int, float]


def write_step(folder: Path, step: int, seed: int = 0) -> Any:
    """Write a step file; return its weights."""
    arrays = np.random.default_rng([step, seed]).standard_normal((3, 4)).astype("<f4")
    header = np.array([step, 4], "<i4").tobytes()
    (folder / f"step_{step:06d}.bin").write_bytes(header + arrays.tobytes())
    return arrays[0]


def write_losses(folder: Path, until: int, *, base: int = 0, scale: float = 1.0) -> list[float]:
    """Write losses up to a step; those after `base` are of the line of `scale`."""
    values = [(scale if step > base else 1.0) / step for step in range(1, until + 1)]
    entries = [{"step": step + 1, "loss": value} for step, value in enumerate(values)]
    (folder / "run.loss.json").write_text(json.dumps(entries))
    return values


def write_state(folder: Path, *arms: str) -> None:
    (folder / "run.state.json").write_text(
        json.dumps({"arms": {arm: {"pulls": 1} for arm in arms}})
    )


@pytest.fixture
def run(reg: Registry) -> Run:
    return reg.create_run("andrea", preset=import_spec("andrea"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three step files, losses of 50 more steps, and a bandit."""
    path = tmp_path / "in"
    path.mkdir()
    for step in (100, 200, 300):
        write_step(path, step)
    write_losses(path, 350)
    write_state(path, "wiki", "repo-docstrings")
    return path


def losses(run: Run) -> list[float]:
    return [one["loss"] for one in run.streams["loss"].read()]


def test_entries_come_with_their_checkpoint_and_later_ones_wait(
    reg: Registry, run: Run, folder: Path
) -> None:
    reports = {one.path: one for one in run.exchange.import_tree(folder)}
    assert reports["run.loss.json"].why == "50 entries wait for their checkpoint"
    assert run.streams["loss"].count == 300
    for step in (100, 200, 300):
        fork = reg.fork(f"andrea/main/step{step:08d}", f"fork-{step}")
        assert losses(fork) == [1 / n for n in range(1, step + 1)]
    assert set(outcomes(run.exchange.import_tree(folder)).values()) == {"there already"}
    write_step(folder, 400)
    write_losses(folder, 400)
    run.exchange.import_tree(folder)
    assert run.streams["loss"].count == 400


def test_loss_at_a_step_is_the_metric_of_its_checkpoint(run: Run, folder: Path) -> None:
    write_losses(folder, 250)
    run.exchange.import_tree(folder)
    assert [one.metrics for one in run.checkpoints()] == [{"loss": 0.01}, {"loss": 0.005}, {}]
    assert run.best().step == 200  # type: ignore[union-attr]
    write_losses(folder, 300)  # the entries of step 300 come after its file
    run.exchange.import_tree(folder)
    assert run.best().step == 300  # type: ignore[union-attr]
    assert run.latest().metrics == {"loss": 1 / 300}  # type: ignore[union-attr]


def test_zombie_arm_of_an_imported_folder_is_found(run: Run, folder: Path) -> None:
    run.exchange.import_tree(folder)
    sources = {"streams/state/arms": ["wiki"], "bandit/arms": ["wiki"]}
    assert run.restore(sources=sources).stale == (  # type: ignore[union-attr]
        "streams/state/arms/repo-docstrings",
    )


def test_after_a_crash_the_run_goes_on_from_the_last_common_checkpoint(
    reg: Registry, run: Run, folder: Path
) -> None:
    run.exchange.import_tree(folder)
    before = [one.digest for one in run.checkpoints()]
    other = write_losses(folder, 450, base=200, scale=2.0)  # training resumed from step 200
    waits = {one.path: one for one in run.exchange.import_tree(folder)}["run.loss.json"]
    assert (waits.outcome, "it begins again" in waits.why) == ("there already", True)
    assert steps(run) == [100, 200, 300]  # nothing is superseded before there is a checkpoint
    weights = {step: write_step(folder, step, 1) for step in (300, 400)}
    reports = {one.path: one for one in run.exchange.import_tree(folder)}
    assert reports["step_000300.bin"].warnings == (
        "the folder went back to step 200; superseded: 300",
    )
    assert "refused" not in outcomes(reports.values()).values()
    assert steps(run) == [100, 200, 300, 400]
    assert losses(run) == other[:400]
    assert run.manifest.stream("loss").archives == ()  # type: ignore[union-attr]
    for one in run.checkpoints()[2:]:
        assert np.array_equal(one.load()["weights"], weights[one.step])
        assert one.metrics == {"loss": other[one.step - 1]}
    assert reg.checkpoint(f"andrea/{before[2].short}").superseded  # and still readable
    assert run.streams["state"].read()[-1]["step"] == 400
    assert losses(reg.fork("andrea/main/step00000300", "fork")) == other[:300]
    assert reg.verify(deep=True).ok


def test_file_that_training_left_behind_is_passed_over(run: Run, folder: Path) -> None:
    write_step(folder, 400)  # never imported, when training goes back to step 200
    for age, step in enumerate((300, 400, 100, 200), start=-10):
        os.utime(folder / f"step_{step:06d}.bin", (1e9 + age, 1e9 + age))
    write_losses(folder, 320, base=200, scale=2.0)
    write_step(folder, 300, 1)
    reports = {one.path: one for one in run.exchange.import_tree(folder)}
    left = reports["step_000400.bin"]
    assert (left.outcome, left.why) == (
        "passed over",
        "training went back: it wrote step_000300.bin later",
    )
    assert steps(run) == [100, 200, 300]
    write_losses(folder, 400, base=200, scale=2.0)
    write_step(folder, 400, 1)
    run.exchange.import_tree(folder)
    assert steps(run) == [100, 200, 300, 400]


def test_file_that_comes_late_takes_its_place(run: Run, folder: Path) -> None:
    late = folder / "step_000200.bin"
    content = late.read_bytes()
    late.unlink()
    run.exchange.import_tree(folder)
    assert steps(run) == [100, 300]
    late.write_bytes(content)
    reports = run.exchange.import_tree(folder)
    assert "refused" not in outcomes(reports).values()
    assert steps(run) == [100, 200, 300]
    assert run.latest().step == 300  # type: ignore[union-attr]
    assert [one.handle.record.streams["loss"].count for one in run.checkpoints()] == [100, 200, 300]
    assert set(outcomes(run.exchange.import_tree(folder)).values()) == {"there already"}


def test_replaced_step_file_without_histories_goes_back_too(run: Run, folder: Path) -> None:
    for one in folder.glob("*.json"):
        one.unlink()
    run.exchange.import_tree(folder)
    write_step(folder, 200, 1)
    (report,) = (one for one in run.exchange.import_tree(folder) if one.warnings)
    assert report.warnings == ("the folder went back to step 100; superseded: 200, 300",)
    assert steps(run) == [100, 200]


def test_import_never_supersedes_what_a_training_program_has_saved(
    reg: Registry, run: Run, folder: Path
) -> None:
    run.exchange.import_tree(folder)
    trained = reg.run("andrea")
    state = trained.restore().state  # type: ignore[union-attr]
    trained.save({**state, "step": 400}, step=400)
    write_step(folder, 300, 1)
    assert outcomes(run.exchange.import_tree(folder))["step_000300.bin"] == "refused"
    assert steps(run.refresh()) == [100, 200, 300, 400]
    trained.save({**state, "step": 500}, step=500)


def test_trainer_on_a_superseded_line_is_refused(reg: Registry, run: Run, folder: Path) -> None:
    run.exchange.import_tree(folder)
    trained = reg.run("andrea")
    state = trained.restore().state  # type: ignore[union-attr]
    write_step(folder, 300, 1)
    run.exchange.import_tree(folder)
    with pytest.raises(Conflict, match="superseded"):
        trained.save({**state, "step": 400}, step=400)
    assert steps(run.refresh()) == [100, 200, 300]


def test_rewritten_beginning_of_a_kept_history_is_refused(run: Run, folder: Path) -> None:
    run.exchange.import_tree(folder)
    write_losses(folder, 450, scale=2.0)
    write_step(folder, 400)
    found = outcomes(run.exchange.import_tree(folder))
    assert found["step_000400.bin"] == found["run.loss.json"] == "refused"
    assert (steps(run), run.streams["loss"].count) == ([100, 200, 300], 300)


def test_history_with_nan_and_repeated_steps_is_continued(run: Run, folder: Path) -> None:
    """A program that appends only has steps of an abandoned line, and a collapse has NaN."""
    path = folder / "run.loss.json"
    entries: list[dict[str, Any]] = [{"step": step, "loss": float("nan")} for step in range(1, 351)]
    path.write_text(json.dumps(entries))
    run.exchange.import_tree(folder)
    entries += [{"step": step, "loss": 2.0} for step in range(301, 420)]  # resumed from step 300
    path.write_text(json.dumps(entries))
    write_step(folder, 400)
    reports = run.exchange.import_tree(folder)
    assert not any(one.warnings for one in reports)
    assert run.streams["loss"].count == 350 + 100
    assert run.latest().metrics == {"loss": 2.0}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state", '{"step": "x"}'),
        ("state", '{"step": -1, "arms": {}}'),
        ("state", "7"),
        ("loss", '[{"loss": 1.0}]'),
        ("loss", '[{"step": 1, "loss": 2}, 3]'),
        ("loss", '[{"step": 300, "lo'),
    ],
)
def test_bad_history_refuses_itself_alone(run: Run, folder: Path, name: str, text: str) -> None:
    path = folder / f"run.{name}.json"
    path.write_text(text)
    found = outcomes(run.exchange.import_tree(folder))
    assert [one for one, said in found.items() if said == "refused"] == [path.name]
    assert steps(run) == [100, 200, 300]


def test_loss_that_is_no_double_is_no_metric(run: Run, folder: Path) -> None:
    entries = [{"step": 100, "loss": 10**400}, {"step": 200, "loss": "x"}, {"step": 300, "loss": 2}]
    (folder / "run.loss.json").write_text(json.dumps(entries))
    run.exchange.import_tree(folder)
    assert [one.metrics for one in run.checkpoints()] == [{}, {}, {"loss": 2.0}]
    assert run.streams["loss"].read() == entries


def test_history_that_is_just_being_written_counts_as_it_was(run: Run, folder: Path) -> None:
    importer = Importer(run.handle.committer, folder, "andrea")
    importer.once()
    write_step(folder, 400)
    write_losses(folder, 400)
    write_state(folder, "wiki")
    found = next(one for one in importer.find()[1] if one.step == 400)
    assert not importer.histories.lacks(found)
    path = folder / "run.loss.json"
    path.write_text(path.read_text()[:-10])
    assert [one.outcome for one in importer.take(found)] == ["imported"]
    newest = run.refresh().latest()
    assert newest is not None
    assert newest.metrics == {"loss": 1 / 400}
    assert newest.handle.record.streams["loss"].count == 400


def test_checkpoint_waits_until_its_histories_are_written(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late() -> None:
        write_losses(folder, 400)
        write_state(folder, "wiki")

    path = folder / "step_000400.bin"
    write_step(folder, 400)
    os.utime(path, (2e9, 2e9))  # after the file of the bandit
    seen: list[list[int]] = []

    def look(act: Callable[[], object]) -> Callable[[], object]:
        return lambda: seen.append(steps(run.refresh())) or act()  # type: ignore[func-returns-value]

    bandit = folder / "run.state.json"
    Clock(monkeypatch, [look(late), look(lambda: os.utime(bandit, (3e9, 3e9))), look(path.stat)])
    list(followed(run, folder))
    assert seen == [[100, 200, 300], [100, 200, 300], [100, 200, 300, 400]]
    newest = run.latest()
    assert newest is not None
    assert newest.metrics == {"loss": 1 / 400}
    marks = {name: mark.count for name, mark in newest.handle.record.streams.items()}
    assert marks == {"loss": 400, "state": 1}


def test_imports_between_deaths_of_the_program_follow_its_line(
    reg: Registry, run: Run, tmp_path: Path
) -> None:
    writer = Writer(tmp_path, seed=27)
    for _ in range(12):
        for _ in range(int(writer.chance.integers(1, 6))):
            writer.act()
        reg.run("andrea").exchange.import_tree(tmp_path, layout="andrea")
    writer.train(CADENCE)
    writer.die_in_a_file()
    writer.go_back(3)  # what was imported last is left again
    writer.finish()
    reports = reg.run("andrea").exchange.import_tree(tmp_path, layout="andrea")
    assert any("superseded" in text for one in reports for text in one.warnings)
    check_line(run.refresh(), writer)
    assert reg.verify().ok


_FOLLOWER = """
import sys, holdfast
run = holdfast.open(sys.argv[1]).run("andrea")
options = dict(layout="andrea", quiet_s=0.3, poll_s=0.01, longest_poll_s=0.05)
for one in run.exchange.watch_folder(sys.argv[2], **options):
    print(one.outcome, one.path, *one.warnings, flush=True)
"""


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_two_thousand_files_are_followed_through_deaths_of_program_and_follower(
    tmp_path: Path,
) -> None:
    folder, url, said = tmp_path / "in", str(tmp_path / "registry"), tmp_path / "said"
    folder.mkdir()
    writer, kills = Writer(folder, seed=int(os.environ.get("FOLLOW_SEED", "27"))), 0
    reg = holdfast.init(url)
    run = reg.create_run("andrea", preset=import_spec("andrea"))

    def catch_up() -> None:
        """Wait until the follower has the newest file, as long as it imports any."""
        writer.finish()
        idle, seen = 0, -1
        while seen != writer.step and idle < 1_200:
            time.sleep(0.1)
            newest = run.refresh().latest()
            before, seen = seen, -1 if newest is None else newest.step
            idle = idle + 1 if seen == before else 0

    with said.open("w") as out:
        command = [sys.executable, "-c", _FOLLOWER, url, str(folder)]
        follower = subprocess.Popen(command, stdout=out)
        for _ in range(25):
            at = int(writer.chance.integers(0, 100))
            for act in range(100):
                writer.act()
                time.sleep(float(writer.chance.exponential(0.04)))
                if act == at:
                    follower.kill()
                    follower.wait()
                    kills += 1
                    follower = subprocess.Popen(command, stdout=out)
        catch_up()
        writer.go_back(3)  # so at least once from files that were imported
        catch_up()
        follower.kill()
        follower.wait()
    lines = said.read_text().splitlines()
    superseded = sum("superseded" in line for line in lines)
    counts = Counter(line.split()[0] for line in lines)
    print(f"{kills=} {writer.files=} {writer.returns=} {writer.torn=} {superseded=} {counts}")
    assert (superseded > 0, writer.files >= 2_000) == (True, True)
    check_line(run, writer)
    assert reg.verify(deep=True).ok
