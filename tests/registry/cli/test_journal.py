"""`journal`: saves that are only on this machine, listed, carried, pushed and deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.registry.saving.journal.background import BackgroundCarrier
from tests.registry.cli.calling import Call, CallJson
from tests.support.sameness import assert_same
from tests.support.states import make_state


@pytest.fixture
def run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with three saves that wait in a journal; nothing is carried in the background."""
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    monkeypatch.setenv("HOLDFAST_JOURNAL", str(tmp_path / "journal"))
    opened = holdfast.open(url).run("night", create=True, seed=7)
    for step in (1, 2, 3):
        opened.save(make_state(step), step=step, metrics={"loss": 1 / step})
    return opened


def test_ls_shows_what_waits_and_carry_carries(call: Call, call_json: CallJson, run: Any) -> None:
    said = call("journal", "ls").stdout.splitlines()
    assert said[0].split() == ["run", "entry", "save", "outcome", "size", "age"]
    assert [line.split()[1] for line in said[1:]] == ["1", "2", "3"]
    (first, *_) = call_json("journal", "ls")
    assert set(first) == {
        *("registry", "run", "entry", "outcome", "reason", "phase", "step", "id", "status"),
        *("saved", "size_bytes"),
    }
    assert (first["outcome"], first["step"]) == ("waiting", 1)
    shown = call_json("run", "show", "night")["journal"]
    assert (shown["entries"], shown["stranded"]) == (3, 0)
    assert shown["size_bytes"] > 0
    assert "entries: 3" in call("run", "show", "night").stdout
    call("journal", "rm", "night", 1, "--yes", status=5)
    assert call_json("journal", "push") == [{"run": "night", "carried": 3, "waiting": 0}]
    assert call("journal", "push").stdout == "night: 0 carried, 0 waiting\n"
    assert call_json("journal", "ls") == []
    assert [one.step for one in run.checkpoints()] == [1, 2, 3]


def test_a_stranded_save_is_kept_and_goes_into_a_fork(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    call("journal", "push")
    for step in (4, 5):
        run.save(make_state(step), step=step)
    other = holdfast.open(url, journal="").run("night")
    other.restore()
    other.save(make_state(44), step=4)
    call("journal", "push")
    listed = call_json("journal", "ls")
    assert [(one["step"], one["outcome"]) for one in listed] == [(4, "stranded"), (5, "stranded")]
    assert "another machine took this run over" in listed[0]["reason"]
    assert call_json("run", "show", "night")["journal"]["stranded"] == 2
    said = call_json("journal", "push", "night", "rescued")
    assert said == {"run": "rescued", "pushed": ["phase main, step 4", "phase main, step 5"]}
    with holdfast.open(url) as opened:
        fork = opened.run("rescued")
        assert [one.step for one in fork.checkpoints()] == [3, 4, 5]
        assert_same(fork.latest().load(), make_state(5))
        assert fork.manifest.created.parent.run == "night"
        assert opened.verify(deep=True).findings == ()
    assert [one.step for one in other.checkpoints()] == [1, 2, 3, 4]
    assert call_json("journal", "ls") == []
    call("journal", "push", "night", "again", status=4)


def test_the_fork_begins_where_a_checkpoint_is_still_whole(
    call: Call, call_json: CallJson, run: Any, url: str
) -> None:
    call("journal", "push")
    run.save(make_state(4), step=4)
    other = holdfast.open(url, journal="").run("night")
    other.restore()
    other.save(make_state(44), step=4)
    first, second, third, _ = other.checkpoints()
    other.retention.evict(third, "no room")
    other.retention.thin(second, "model")
    call("journal", "push")
    assert call_json("journal", "push", "night", "rescued")["pushed"] == ["phase main, step 4"]
    with holdfast.open(url, journal="") as opened:
        fork = opened.run("rescued")
        assert [one.step for one in fork.checkpoints()] == [first.step, 4]
        assert_same(fork.latest().load(), make_state(4))


def test_saves_of_a_run_without_a_checkpoint_go_into_a_new_run(
    call: Call, call_json: CallJson, run: Any, url: str
) -> None:
    holdfast.open(url, journal="").run("night").save(make_state(0), step=0)
    call("journal", "push")
    assert len(call_json("journal", "push", "night", "rescued")["pushed"]) == 3
    with holdfast.open(url) as opened:
        assert [one.step for one in opened.run("rescued").checkpoints()] == [1, 2, 3]


def test_saves_of_a_lost_registry_go_into_another_one(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    run.status = "interrupted"
    lost = Path(url).rename(tmp_path / "gone")
    other = str(tmp_path / "other")
    old = holdfast.init(other).id
    call("journal", "push", "day", "rescued", "--to", other, status=4)
    call("journal", "push", "night", "rescued", "--to", other, "--from", "0" * 32, status=4)
    with run.handle.journal.folder.lock("carrying").held():
        call("journal", "push", "night", "rescued", "--to", other, status=5)
    said = call_json("journal", "push", "night", "rescued", "--to", other)
    assert said["pushed"] == [f"phase main, step {step}" for step in (1, 2, 3)]
    with holdfast.open(other, journal="") as opened:
        assert opened.id == old
        assert [one.step for one in opened.run("rescued").checkpoints()] == [1, 2, 3]
        assert_same(opened.run("rescued").latest().load(), make_state(3))
        assert opened.verify(deep=True).findings == ()
    assert call_json("journal", "ls") == []
    assert call_json("journal", "push", "night", "rescued", "--to", other)["pushed"] == []
    lost.rename(url)  # it was not lost after all
    assert call_json("journal", "push")[0]["waiting"] == 0
    with holdfast.open(url, journal="") as opened:
        assert opened.run("night").checkpoints() == []


def test_the_newest_save_of_a_lost_registry_is_still_here(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    call("journal", "push")
    Path(url).rename(tmp_path / "gone")
    holdfast.init(url)
    call("trust", url)
    said = call_json("journal", "push", "night", "night", "--to", url)
    assert said == {"run": "night", "pushed": ["phase main, step 3"]}
    with holdfast.open(url, journal="") as opened:
        assert_same(opened.run("night").latest().load(), make_state(3))


def _of(journal: Path, what: str) -> list[Path]:
    return sorted(journal.glob(f"*/night/{what}"))


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 50)])
def test_a_lost_entry_is_restored_before_saves_go_into_another_registry(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path, harm: Any
) -> None:
    harm(_of(tmp_path / "journal", f"entries/{2:020d}")[0])
    Path(url).rename(tmp_path / "gone")
    holdfast.init(url)
    call("trust", url)
    said = call_json("journal", "push", "night", "night", "--to", url)
    assert said["pushed"] == [f"phase main, step {step}" for step in (1, 2, 3)]


def test_a_damaged_save_keeps_no_other_from_another_registry(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    write = run.handle.journal.folder.entry(2).write
    for pack in _of(tmp_path / "journal", f"states/{write}/packs/*/*"):
        if pack.stat().st_nlink == 1:  # other saves have the others too
            os.truncate(pack, 50)
    Path(url).rename(tmp_path / "gone")
    holdfast.init(url)
    call("trust", url)
    said = call("journal", "push", "night", "night", "--to", url, status=6)
    assert "2 other saves were pushed" in said.stderr
    with holdfast.open(url, journal="") as opened:
        assert [one.step for one in opened.run("night").checkpoints()] == [1, 3]
    (left,) = call_json("journal", "ls")
    assert (left["entry"], left["outcome"]) == (2, "damaged")
    assert call_json("journal", "push", "night", "night", "--to", url)["pushed"] == []


def test_rm_deletes_a_stranded_save(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    holdfast.open(url, journal="").run("night").save(make_state(0), step=0)
    call("journal", "push")
    call("journal", "rm", "night", 2, status=3)
    assert call("journal", "rm", "night", 2, "--yes").stdout == "deleted: night, entry 2\n"
    assert [one["entry"] for one in call_json("journal", "ls")] == [1, 3]
    assert len(list(tmp_path.glob("journal/*/night/states/*"))) == 2
    call("journal", "rm", "night", 2, "--yes", status=4)
    call("journal", "rm", "demo", 2, "--yes", status=4)


def test_a_journal_has_to_be_named(call: Call) -> None:
    call("journal", "ls", status=3)


def test_what_else_lies_in_a_journal_stops_no_command(
    call: Call, call_json: CallJson, run: Any, url: str, tmp_path: Path
) -> None:
    (folder,) = (tmp_path / "journal").glob("*/night")
    for name in ("lost+found", "0123456789abcdef/mine.txt", f"{folder.parent.name}/mine.txt"):
        (tmp_path / "journal" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "journal" / name).write_text("mine")
    (folder.parent / "mine").mkdir()
    copied = shutil.copytree(folder, folder.parent / "a-copy")
    (copied / "states" / "fedcba9876543210" / "packs").mkdir(parents=True)
    before = {path: path.is_file() and path.read_bytes() for path in copied.rglob("*")}
    assert {one["run"] for one in call_json("journal", "ls")} == {"a-copy", "night"}
    said = call("journal", "push", status=6)
    assert said.stdout == "a-copy: 0 carried, 3 waiting\nnight: 3 carried, 0 waiting\n"
    assert "a-copy" in said.stderr
    assert [one.step for one in run.checkpoints()] == [1, 2, 3]
    assert "a-copy" not in holdfast.open(url).run_names()
    assert all(
        path.exists() and (path.is_dir() or path.read_bytes() == before[path]) for path in before
    )
