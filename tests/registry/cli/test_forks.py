"""Runs that begin with a preset, come from another one, and are dropped; and their history."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import holdfast
from holdfast.registry.face.syncing import sync
from holdfast.registry.history import actions
from holdfast.registry.history.action_texts import in_words
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.spec.presets import load_preset, preset_names
from holdfast.registry.values.digest import Digest
from tests.registry.cli.calling import Call, CallJson, Terminal


def words(text: str) -> str:
    return " ".join(text.split())


# Presets and policies


def test_run_create_with_a_preset(call: Call, call_json: CallJson, tmp_path, url: str) -> None:
    assert call_json("run", "create", "new", "--preset", "default")["preset"] == "default"
    shown = call("run", "show", "new").stdout
    assert "preset       default" in shown
    assert "keeps        last 3, best 1, every 10000" in shown
    assert "None" not in shown  # nothing is best yet
    (tmp_path / "mine.toml").write_text(
        'format = "holdfast.preset/1"\nname = "mine"\nretention = { last = 7 }\n'
    )
    call("run", "create", "own", "--preset", tmp_path / "mine.toml")
    with holdfast.open(url) as opened:
        assert opened.run("own").manifest.spec == RunSpec(name="mine", retention=Retention(last=7))
    assert "'default'" in call("run", "create", "x", "--preset", "defualt", status=4).stderr
    assert "x" not in call("run", "ls").stdout.split()


def test_values_are_set_as_the_page_shows(call: Call, url: str, tmp_path, monkeypatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "presets.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("head.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    for line in re.findall(r"^holdfast (.*--set.*)$", page, re.MULTILINE):
        call(*shlex.split(line, comments=True))
    with holdfast.open(url) as opened:
        specs = {name: opened.run(name).manifest.spec for name in ("few", "two", "gain", "tuned")}
        assert opened.run("loose").manifest.spec.transitions[0].strict == ()
    assert specs["few"].retention == Retention(last=5, best=1, every=10_000, wait=3)
    assert specs["two"].retention == Retention(last=2)
    assert [one.mode for one in specs["gain"].monitors] == ["max"]
    assert specs["tuned"].phases[0].retention == Retention(last=7, best=1)
    for wrong, told in ((["retention.last"], "has no value"), (["a=1", "a=2"], "given twice")):
        sets = [word for one in wrong for word in ("--set", one)]
        assert told in call("run", "create", "x", "--preset", "default", *sets, status=2).stderr


def test_run_create_with_a_policy(call: Call, url: str) -> None:
    options = ["--last", 3, "--best", 1, "--every", 1000, "--days", 7]
    call("run", "create", "new", "--monitor", "loss:min", *options)
    with holdfast.open(url) as opened:
        found = opened.run("new").manifest.spec.retention
    assert found == Retention(last=3, best=1, every=1000, for_days=7)


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_run_create_refuses_a_bad_rule(number: str, call: Call) -> None:
    call("run", "create", "new", "--last", number, status=2)
    assert "new" not in call("run", "ls").stdout


def test_preset_ls(call: Call, call_json: CallJson) -> None:
    lines = call("preset").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *preset_names()]
    assert preset_names()[:2] == ["default", "pretrain"]
    assert load_preset("default").about in "\n".join(lines)
    listed = call_json("preset")
    assert listed[0].keys() == {"name", "for", "about"}
    assert [one["name"] for one in listed] == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_preset_show_gives_what_can_be_copied(name: str, call: Call, call_json, tmp_path) -> None:
    copy = tmp_path / "copy.toml"
    copy.write_text(call("preset", name).stdout)
    assert load_preset(copy) == load_preset(name)
    assert "#" in copy.read_text()  # with its comments
    assert tomllib.loads(copy.read_text())["name"] == call_json("preset", name)["name"]


def test_a_preset_that_is_not_there(call: Call) -> None:
    assert "'default'" in call("preset", "defalt", status=4).stderr


# Forks


def test_fork(call: Call, call_json: CallJson) -> None:
    assert call("run", "create", "child", "--from", "demo/main/step10").stdout == "child\n"
    assert call("ls", "child").stdout.splitlines()[1].split()[:2] == ["main", "10"]
    child = call_json("run", "show", "child")
    assert child["parent"] == {
        "run": "demo",
        "commit": 1,
        "ref": "demo/main/step00000010",
        "id": call_json("show", "demo/main/step10")["id"],
    }
    assert child["config"] == {"lr": 0.1}
    assert child["seed"] == "0x000000000000002a"
    assert child["forks"] is None  # nobody looked for them
    call("run", "create", "other", "--from", "demo/best")
    demo = call_json("run", "show", "demo", "--forks")
    assert demo["forks"] == ["child", "other"]
    assert demo["parent"] is None
    assert call_json("run", "ls") == [
        call_json("run", "show", name, "--forks") for name in ("child", "demo", "other")
    ]
    assert "parent       demo/main/step00000010, commit 1" in call("run", "show", "child").stdout
    assert "forks        child, other" in call("run", "show", "demo", "--forks").stdout


def test_fork_with_another_seed_configuration_and_preset(
    call: Call, call_json: CallJson, tmp_path
) -> None:
    (tmp_path / "c.json").write_text('{"lr": 0.5}')
    options = ["--seed", 7, "--config", tmp_path / "c.json", "--preset", "default"]
    shape = call_json("run", "create", "child", "--from", "demo", *options)
    assert shape["seed"] == "0x0000000000000007"
    assert shape["config"] == {"lr": 0.5}
    assert shape["preset"] == "default"


def test_fork_of_what_is_not_there(call: Call) -> None:
    call("run", "create", "child", "--from", "demo/main/step11", status=4)
    call("run", "create", "demo", "--from", "demo", status=5)
    assert "child" not in call("run", "ls").stdout


def test_a_run_that_cannot_be_read_hides_no_fork(call: Call, call_json, url: str) -> None:
    call("run", "create", "child", "--from", "demo")
    call("run", "create", "broken")
    with holdfast.open(url) as opened:
        opened.handle.store.backend.put("runs/broken/log/00000000000000000000", b"x")
    assert call_json("run", "show", "demo", "--forks")["forks"] == ["child"]


def test_log_graph_goes_on_below_the_fork(call: Call, call_json: CallJson) -> None:
    call("run", "create", "child", "--from", "demo/phase2/step20")
    call("run", "create", "grandchild", "--from", "child")
    call("tag", "set", "demo", "late")
    header, *rows = call("log", "grandchild", "--graph").stdout.splitlines()
    assert header.split() == ["n", "time", "author", "what"]
    assert [row.split()[:2] for row in rows if row.startswith("*")] == [
        *(["*", "1"], ["*", "0"]),
        *(["*", "1"], ["*", "0"]),
        *(["*", "2"], ["*", "1"], ["*", "0"]),
    ]
    bars = {place: words(row) for place, row in enumerate(rows) if row.startswith("|")}
    assert bars == {
        2: "| forked from child at commit 1",
        5: "| forked from demo at commit 2",
    }
    assert "begin the run, a fork of demo/phase2/step00000020" in rows[4]
    assert "save main/step00000010" in rows[7]
    assert "late" not in "".join(rows)
    assert len(call("log", "grandchild").stdout.splitlines()) == 3
    assert len(call("log", "grandchild", "--graph", "-n", 3).stdout.splitlines()) == 5
    assert len(call("log", "grandchild", "--graph", "-n", 2).stdout.splitlines()) == 3
    shapes = call_json("log", "grandchild", "--graph", "-n", 6)
    assert [(one["run"], one["n"]) for one in shapes] == [
        *(("grandchild", 1), ("grandchild", 0), ("child", 1), ("child", 0)),
        *(("demo", 2), ("demo", 1)),
    ]
    assert "run" not in call_json("log", "grandchild")[0]


def test_log_graph_without_the_parent(call: Call, url: str, tmp_path) -> None:
    call("run", "create", "child", "--from", "demo")
    mirror = str(tmp_path / "mirror")
    holdfast.init(mirror, skip_race_probe=True).close()
    sync(url, mirror, ["child"])
    rows = call("log", "child", "--graph", "-r", mirror).stdout.splitlines()
    assert words(rows[-1]) == "| forked from demo at commit 2, which is not in this registry"
    # Another run of the same name is not taken for it.
    with holdfast.open(mirror) as opened:
        run = opened.create_run("demo", seed=43)
        for step in (1, 2, 3):
            run.save({"w": step}, step=step)
    rows = call("log", "child", "--graph", "-r", mirror).stdout.splitlines()
    assert words(rows[-1]).endswith("and the run of this name is another one")
    assert len(rows) == 4


# Dropping


def test_drop(call: Call, call_json: CallJson) -> None:
    printed = call("run", "rm", "demo", "--reason", "no use", "--yes").stdout
    assert printed == "dropped: demo; for 7 d `holdfast undo demo` brings it back\n"
    assert call_json("run", "show", "demo")["dropped"] == "no use"
    assert "dropped      no use" in call("run", "show", "demo", "--forks").stdout
    assert call("run", "ls").stdout.splitlines()[1].split()[1] == "dropped"
    assert "drop the run: no use" in call("log", "demo", "-n", 1).stdout
    assert (
        "the run was dropped"
        in call("run", "rm", "demo", "--reason", "x", "--yes", status=5).stderr
    )


def test_undrop_and_free(call: Call, call_json: CallJson, url: str) -> None:
    assert "is not dropped" in call("undo", "demo", "--from", url, status=4).stderr
    assert "nothing" in call("undo", "demo", status=4).stderr
    assert call_json("drops") == {"delay_s": 7 * 86_400, "keep": False, "epoch": 0}
    set_to = {"delay_s": 43_200, "keep": False, "epoch": 1}
    assert call_json("drops", "--delay", "12h") == set_to
    call("run", "rm", "demo", "--reason", "no use", "--yes")
    assert call_json("gc", "--grace", 0)["hidden_runs"] == ["demo"]
    assert "demo: kept, since `undo` may bring" in call("gc", "--grace", 0).stdout
    assert call("undo", "demo").stdout == "back: demo, with 2 checkpoints\n"
    assert "take the drop of the run back" in call("log", "demo", "-n", 1).stdout
    call("run", "rm", "demo", "--reason", "no use", "--now", "--yes")
    assert call_json("run", "show", "demo")["freed"] is True
    assert "dropped, freed" in call("run", "ls").stdout
    assert "undo demo --from MIRROR" in call("undo", "demo", status=5).stderr
    assert "back: demo" in call("undo", "demo", "--from", url).stdout  # nothing was deleted
    assert call_json("drops", "--keep")["keep"] is True
    assert "keeps" in call("gc", "--grace", 0).stdout
    assert call_json("drops", "--no-keep")["keep"] is False


def test_drop_asks_nobody_in_a_pipe(call: Call, call_json: CallJson) -> None:
    assert "--yes" in call("run", "rm", "demo", "--reason", "no use", status=2).stderr
    call("run", "rm", "demo", "--yes", status=2)
    call("run", "rm", "demo", "--yes", "--reason", " ", status=3)
    assert call_json("run", "show", "demo")["dropped"] is None


@pytest.mark.parametrize(("typed", "dropped"), [("demo", True), ("dmeo", False), ("y", False)])
def test_drop_has_the_name_typed_on_a_terminal(
    typed: str, dropped: bool, url: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from holdfast.registry.cli import runs
    from holdfast.registry.errors import InvalidInput

    monkeypatch.setattr("sys.stdin", Terminal(f"{typed}\n"))
    monkeypatch.setattr("builtins.input", lambda prompt="": f"{typed}")
    arguments = {"run": "demo", "registry": url, "reason": "no use", "yes": False, "now": False}
    arguments["storage_option"] = None
    if dropped:
        runs.rm(**arguments)
    else:
        with pytest.raises(InvalidInput, match="another name was typed"):
            runs.rm(**arguments)
    with holdfast.open(url) as opened:
        assert (opened.run("demo").manifest.dropped == "no use") is dropped
    assert "demo holds 2 checkpoints" in capsys.readouterr().err


# What a run went through


def test_phase_of_a_run(call: Call, call_json: CallJson, url: str) -> None:
    assert call("run", "ls").stdout.splitlines()[1].split()[:3] == ["demo", "running", "2"]
    assert call_json("run", "show", "demo")["phase"] == 2
    with holdfast.open(url) as opened:
        run = opened.run("demo")
        second = run.checkpoints()[-1]
        enter = actions.EnterPhase(
            from_phase="2", to_phase="finetune", source="phase2/best", manifest=second.digest
        )
        run.handle.committer.commit(lambda state: [enter])
    shape = call_json("run", "show", "demo")
    assert shape["phase"] == "finetune"
    assert shape["phases"] == [
        {
            "phase": "finetune",
            "from": 2,
            "pivot": None,
            "source": "phase2/best",
            "commit": 4,
            "superseded": False,
            "config": None,
            "meta": None,
        }
    ]
    shown = call("run", "show", "demo").stdout
    assert "phase        finetune" in shown
    assert "phases       2 to finetune" in shown
    call("run", "create", "new")
    assert call("run", "ls").stdout.splitlines()[2].split()[:3] == ["new", "running", "-"]


# Pivots, and runs side by side


def test_run_pivot(call: Call, call_json: CallJson, url: str, tmp_path: Path) -> None:
    assert (
        call("run", "pivot", "demo", "polish").stdout
        == "pivoted: demo at demo/phase2/step00000020\n"
    )
    assert "was changed" in call("run", "pivot", "demo", "polish").stdout
    shape = call_json("run", "pivot", "demo", "polish")
    assert (shape["new"], shape["pivot"], shape["from"]) == (
        False,
        "polish",
        "demo/phase2/step00000020",
    )
    assert call_json("run", "pivot", "demo", "again")["rows"] == [
        {"part": "model", "change": "carry", "to": None},
        {"part": "epoch", "change": "carry", "to": None},
    ]
    assert [one["pivot"] for one in call_json("run", "show", "demo")["phases"]] == [
        "polish",
        "again",
    ]
    assert "phases       pivot polish, pivot again" in call("run", "show", "demo", "--forks").stdout
    assert "pivot again in phase 2; carry model, epoch" in words(call("log", "demo").stdout)
    with holdfast.open(url) as opened:
        opened.run("demo").status = "interrupted"
    policy = tmp_path / "policy.toml"
    policy.write_text("floor = 0.2")
    call("run", "pivot", "demo", "third", "--config", policy, "--meta", "why=samples repeat")
    shape = call_json("run", "show", "demo")
    assert (shape["status"], shape["config"]) == ("interrupted", {"floor": 0.2})
    assert [one["config"] for one in shape["phases"]] == [None, None, {"floor": 0.2}]
    assert shape["phases"][2]["meta"] == {"why": "samples repeat"}
    call("run", "pivot", "none", "x", status=4)


def test_a_warm_start_is_shown_with_its_source(call: Call, call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("warm")
        run.phases.start("warm_start", opened.checkpoint("demo/main/step10"), carry="model")
    source = "demo/main/step00000010"
    (phase,) = call_json("run", "show", "warm")["phases"]
    assert (phase["pivot"], phase["source"]) == (None, source)
    assert f"warm start from {source}" in call("run", "show", "warm").stdout
    said = words(call("log", "warm").stdout)
    assert f"start phase main warm, from {source}; carry model; reset epoch" in said


def test_a_status_says_why(call: Call, call_json: CallJson, url: str) -> None:
    """A fork is `forked` until it has a checkpoint that it did not inherit."""
    call("run", "create", "other", "--from", "demo/main/step10")

    def said(name: str) -> str:
        return words(call("run", "show", name).stdout.splitlines()[1])

    def listed() -> str:
        lines = call("run", "ls", "--columns", "run,status").stdout.splitlines()
        return dict(line.split(maxsplit=1) for line in lines)["other"]

    assert said("other") == "status forked: nobody has trained this fork yet"
    assert (listed(), call_json("run", "show", "other")["status"]) == ("forked", "running")
    fits = call("run", "ls", "--where", "status=forked", "--columns", "run").stdout
    assert fits.split() == ["run", "other"]
    with holdfast.open(url) as opened:
        opened.run("demo").status = "interrupted"
        run = opened.run("other")
        run.restore()
        run.save({"w": np.zeros(600)}, step=20, metrics={"loss": 1})
    assert (said("other"), listed()) == ("status running", "running")
    ended = "its program ended, or got a signal, before it said that the run is complete"
    assert said("demo") == f"status interrupted: {ended}"


def test_run_diff(call: Call, call_json: CallJson, url: str) -> None:
    call("run", "create", "other", "--from", "demo/main/step10")
    with holdfast.open(url) as opened:
        run = opened.run("other")
        run.restore()
        run.save({"model": {"w": np.zeros(600)}, "epoch": 2}, step=20, phase=2, metrics={"loss": 1})
    shape = call_json("diff", "--runs", "demo", "other")
    assert shape["fork"]["ref"] == "demo/main/step00000010"
    assert (shape["settings"], shape["config"]) == ([], [])
    assert [(one["step"], one["same"]) for one in shape["steps"]] == [(10, True), (20, False)]
    assert shape["differs_at"] == {"phase": 2, "step": 20}
    assert [one["path"] for one in shape["tensors"]] == ["model/w"]
    lines = call("diff", "--runs", "demo", "other").stdout.splitlines()
    assert lines[0] == "fork: demo/main/step00000010"
    assert words(lines[4]) == "phase2/step00000020 loss=0.25 loss=1 differs"
    assert "~ model/w: float32[600] -> float64[600]  4.7 KiB" in lines
    assert "no common step differs" in call("diff", "--runs", "other", "other").stdout


def test_run_diff_of_a_sweep(call: Call, call_json: CallJson, url: str) -> None:
    """A row for each run, with what is not the same in all; it is sorted as any table."""
    with holdfast.open(url) as opened:
        for n, config in enumerate(
            ({"lr": 0.1, "opt": {"b": 1}}, {"lr": 0.3, "opt": {"b": 1}}, {"lr": 0.1})
        ):
            monitor = holdfast.Monitor(metric="loss", mode="min")
            run = opened.create_run(f"sweep-{n}", config=config, seed=7, monitor=monitor)
            run.save({"w": np.zeros(3)}, step=1, metrics={"loss": 3.0 - n})
            run.save({"w": np.ones(3)}, step=2, metrics={"loss": 9.0})
    rows = call_json("diff", "--runs", "sweep-*")
    assert rows[0] == {
        "run": "sweep-0",
        "config": {"lr": 0.1, "opt/b": 1},
        "settings": {},
        "ref": "sweep-0/main/step00000001",
        "metrics": {"loss": 3.0},
    }
    assert [one["config"] for one in rows[1:]] == [{"lr": 0.3, "opt/b": 1}, {"lr": 0.1}]
    header, *lines = call("diff", "--runs", "sweep-*", "demo", "--sort", "loss").stdout.splitlines()
    assert header.split()[:3] == ["run", "lr", "opt/b"]
    assert [line.split()[0] for line in lines] == ["demo", "sweep-2", "sweep-1", "sweep-0"]
    assert "a run is compared with others" in call("diff", "--runs", "demo", status=3).stderr
    with holdfast.open(url) as opened:  # a seed of the program beside the seed of the run
        for seed in (1, 2, 3):
            opened.create_run(f"seed-{seed}", config={"seed": seed}, seed=seed)
    rows = call_json("diff", "--runs", "seed-*")
    assert [(one["settings"], one["config"]) for one in rows[:1]] == [
        ({"run.seed": 1}, {"seed": 1})
    ]


def test_which_keys_of_a_sweep_go_with_a_metric(call: Call, call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as opened:
        for n in range(8):
            run = opened.create_run(f"sweep-{n}", config={"lr": n, "rate": 2 * n, "id": f"x{n}"})
            run.save({"w": np.zeros(3)}, step=1, metrics={"acc": n / 8})
    shape = call_json("diff", "--runs", "sweep-*", "--rank", "acc:max")
    assert (shape["metric"], shape["mode"], shape["runs"]) == ("acc", "max", 8)
    assert shape["unranked"] == {"id": "almost every run has another value"}
    (key,) = shape["keys"]
    assert set(key) == {
        *("key", "confounded", "runs", "strength", "correlation", "chance", "is_hump"),
        *("best", "best_mean", "best_runs"),
    }
    done = call("diff", "--runs", "sweep-*", "--rank", "acc:max")
    header, first, *said = done.stdout.splitlines()
    assert header.split() == [*("key", "strength", "chance", "correlation", "best", "mean", "runs")]
    assert words(first).startswith("lr 100.0% 0.1% +1.00 ")
    assert "Nothing tells lr, rate apart: they differ only together." in said
    assert done.stderr == "not ranked: id (almost every run has another value)\n"
    fits = ("diff", "--runs", "sweep-*", "--where", "lr >= 2", "--rank", "acc:max")
    assert call_json(*fits)["runs"] == 6
    few = call("diff", "--runs", "sweep-[0-4]", "--rank", "acc:max", status=3).stderr
    assert "too few runs" in few
    assert "found 5" in few
    for slot in (Path(url) / "runs/sweep-3/log").iterdir():
        slot.write_bytes(b"{")
    assert call_json("diff", "--runs", "sweep-*", "--rank", "acc:max", status=6)["runs"] == 7
    assert "METRIC:min or METRIC:max" in call("diff", "--runs", "*", "--rank", "a", status=2).stderr
    assert "--runs compares runs" in call("diff", "demo", "demo", "--rank", "a", status=2).stderr


# Words for every action

_ONE, _TWO = Digest.of(b"1"), Digest.of(b"2")
_REFS = {4: "main/step00000004", 5: "main/step00000005"}
_SAID = [
    (
        actions.CreateRun(
            config_hash=_ONE,
            seed="0" * 16,
            environment={},
            spec=RunSpec(name="hydra"),
            parent=actions.Parent(
                run="old", commit=3, head=_ONE, checkpoint=_TWO, phase="1", step=7
            ),
        ),
        "begin the run, preset hydra, a fork of old/phase1/step00000007",
    ),
    (actions.CreateRun(config_hash=_ONE, seed="0" * 16, environment={}), "begin the run"),
    (actions.SetStatus(status="failed"), "status failed"),
    (actions.TakeOver(token="t", host="node7"), "node7 trains from here"),
    (actions.Rewind(to=4), "go back to main/step00000004"),
    (actions.Rewind(to=None), "go back to the beginning"),
    (
        actions.EnterPhase(
            from_phase="1",
            to_phase="2",
            source="gates/bc_best",
            manifest=_ONE,
            rows=(
                actions.AppliedRow(part="model", change="carry"),
                actions.AppliedRow(part="optimizer", change="reset"),
                actions.AppliedRow(part="model", change="freeze", to="teacher"),
                actions.AppliedRow(part="seeds", change="carry"),
            ),
        ),
        "enter phase 2 from 1, with gates/bc_best; carry model, seeds; reset optimizer; "
        "freeze model as teacher",
    ),
    (actions.DropRun(reason="no use"), "drop the run: no use"),
    (actions.HideRun(reason="no use"), "drop the run: no use"),
    (actions.UndropRun(), "take the drop of the run back"),
    (actions.RaiseVersion(version=2), "raise the schema version to 2"),
    (
        actions.AddCheckpoint(
            manifest=_ONE,
            phase="main",
            step=4,
            metrics={"loss": 0.5},
            size_bytes=1,
            tier="milestone",
            companions={"teacher": _TWO},
            nonfinite=("model/w",),
            held_back=True,
        ),
        f"save main/step00000004 {_ONE.short} loss=0.5 tier milestone with teacher "
        "NaN or infinity in model/w (held back)",
    ),
    (
        actions.AddCheckpoint(manifest=_ONE, phase="main", step=4, size_bytes=1),
        f"save main/step00000004 {_ONE.short}",
    ),
    (
        actions.ReportMetrics(checkpoint=5, metrics={"acc": 0.25}, tier="milestone"),
        "report main/step00000005 acc=0.25 tier milestone",
    ),
    (
        actions.Evict(
            evictions=(
                actions.Eviction(checkpoint=4, reason="not among last 1"),
                actions.Eviction(checkpoint=5, reason="superseded"),
            )
        ),
        "evict main/step00000004 (not among last 1), main/step00000005 (superseded)",
    ),
    (
        actions.Thin(
            thinnings=(actions.Thinning(checkpoint=4, keep=("model", "rng"), reason="not last"),)
        ),
        "thin main/step00000004 to model, rng (not last)",
    ),
    (actions.Recover(checkpoints=(4, 5)), "bring back main/step00000004, main/step00000005"),
    (actions.SetTag(name="paper", checkpoint=5), "tag paper at main/step00000005"),
    (actions.RemoveTag(name="paper"), "remove tag paper"),
    (
        actions.SetHold(checkpoint=4, until_ms=1_800_000_000_000, reason="an audit"),
        "hold main/step00000004 until 2027-01-15 08:00:00Z: an audit",
    ),
    (actions.RemoveHold(), "end the hold on the run, its time is over"),
    (
        actions.RemoveHold(checkpoint=4, reason="no audit"),
        "end the hold on main/step00000004, early: no audit",
    ),
    (actions.SetNote(text="it wins"), "note on the run: it wins"),
    (
        actions.SetNote(checkpoint=4, text="x" * 200 + "\nmore"),
        f"note on main/step00000004: {'x' * 120} ...",
    ),
    (actions.SetNote(checkpoint=4, text=""), "remove the note on main/step00000004"),
    (actions.SetLabels(labels=("a", "b")), "labels: a, b"),
    (actions.SetLabels(labels=()), "labels: none"),
    (
        actions.SetPin(kind="gate", name="bc", manifest=_ONE, checkpoint=4, replaces=_TWO),
        f"gate bc: {_ONE.short} from main/step00000004 in place of {_TWO.short}, damaged",
    ),
    (
        actions.SetPin(kind="artifact", name="grp", manifest=_ONE),
        f"artifact grp: {_ONE.short}",
    ),
    (actions.PointRelease(version="1.2.0"), "releases/latest is 1.2.0"),
    (
        actions.PointRelease(version="1.1.0", reason="1.2.0 loses"),
        "releases/latest is 1.1.0: 1.2.0 loses",
    ),
    (
        actions.Promote(
            version=3, manifest=_ONE, checkpoint=4, phase="2", step=4, mu=25.0, sigma=8.5
        ),
        "pool v0003: main/step00000004 mu=25 sigma=8.5",
    ),
    (
        actions.Promote(
            version=1, manifest=_ONE, gate="bc", phase="1", step=4, mu=0.0, sigma=1.0, frozen=True
        ),
        "pool v0001: gates/bc mu=0 sigma=1 frozen",
    ),
    (
        actions.Promote(version=2, manifest=_ONE, phase="1", step=9, mu=0.0, sigma=1.0),
        "pool v0002: phase 1, step 9 mu=0 sigma=1",
    ),
    (
        actions.RateMatch(
            match="m1",
            ratings=(
                actions.Rated(version=3, mu=26.0, sigma=8.0, games=1, wins=1),
                actions.Rated(version=4, mu=24.0, sigma=8.0, games=1, wins=0),
            ),
        ),
        "pool: match m1: v0003 mu=26 sigma=8, v0004 mu=24 sigma=8",
    ),
    (
        actions.EvictEntries(versions=(1, 2), reason="the pool is full"),
        "pool: v0001, v0002 out, the pool is full",
    ),
    (
        actions.AppendStream(
            stream="loss",
            lifetime="forever",
            manifest=_ONE,
            start=10,
            count=5,
            first_step=100,
            last_step=140,
        ),
        "append to stream loss: 15 entries in all, steps 100 to 140 in the newest segment",
    ),
    (
        actions.ArchiveStream(stream="loss", label="pivot-1"),
        "stream loss: archived as pivot-1, and emptied",
    ),
    (
        actions.Claim(group="eval", checkpoint=4, follower="job-7", until_ms=0),
        "eval: job-7 takes main/step00000004 until 1970-01-01 00:00:00Z",
    ),
    (
        actions.Acknowledge(group="eval", checkpoint=4, follower="job-7"),
        "eval: done with main/step00000004",
    ),
]


@pytest.mark.parametrize(("action", "said"), _SAID, ids=lambda one: getattr(one, "action", None))
def test_words(action: Any, said: str) -> None:
    assert in_words(action, _REFS, 4) == said


def test_every_action_has_words() -> None:
    union = get_args(get_args(actions.Action)[0]) or get_args(actions.Action)
    assert {type(action) for action, _ in _SAID} == set(union)
