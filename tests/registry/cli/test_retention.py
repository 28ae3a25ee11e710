"""`prune`, `evict`, `undo` and `hold`."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.registry.cli import history_listing
from holdfast.registry.history import RunLog
from holdfast.registry.spec import Retention
from tests.registry.cli.calling import Call, CallJson
from tests.support.loads import steps_at


@pytest.fixture
def long(url: str) -> str:
    """A run of six checkpoints, the one of step 20 best; nothing says what may go."""
    with holdfast.open(url) as opened:
        monitor = holdfast.Monitor(metric="loss", mode="min")
        run = opened.create_run("long", seed=1, monitor=monitor)
        for step in range(10, 70, 10):
            state = {"w": np.arange(200) + step}
            run.save(state, step=step, metrics={"loss": abs(step - 20) + 1.0})
    return "long"


def test_prune_tells_what_and_why(call: Call, call_json: CallJson, long: str) -> None:
    header, *rows, counts = call("prune", long, "--last", 2).stdout.splitlines()
    assert header.split() == ["phase", "step", "id", "tier", "is", "why"]
    found = {row.split()[1]: row.split(maxsplit=5)[4:] for row in rows}
    assert list(found) == ["10", "20", "30", "40", "50", "60"]
    assert found["20"] == ["kept", "best/loss"]
    assert found["60"] == ["kept", "latest, last 2"]
    assert found["50"] == ["kept", "last 2"]
    assert found["10"] == ["goes", "not among last 2 of phase main; no pin"]
    assert counts == "3 checkpoints kept, 3 evicted"
    assert steps_at(None, long) == [20, 50, 60]


def test_a_dry_run_counts_what_evictions_would_free_together(
    call: Call, call_json: CallJson, long: str, url: str
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("twice")  # two checkpoints that only together hold bytes alone
        for step, state in enumerate((np.arange(900.0), np.arange(900.0), np.ones(3)), 1):
            run.save({"w": state, "step": step}, step=step)
    plan = ("prune", "twice", "--last", 1, "--dry-run")
    assert "--bytes counts what" in call(*plan).stderr
    assert call_json(*plan)["freed_bytes"] is None

    def needed() -> int:
        found = call_json("du")
        return int(found["own_bytes"]) + int(found["shared_bytes"])

    (twice,) = (one for one in call_json("du")["runs"] if one["run"] == "twice")
    alone = sum(one["freed_bytes"] for one in twice["states"][:2])
    freed, before = call_json(*plan, "--bytes")["freed_bytes"], needed()
    assert freed > alone + 7000
    assert "gc and repack would free 7.9 KiB after" in call(*plan, "--bytes").stdout
    call(*plan[:-1], "--bytes", status=2)
    call(*plan[:-1])
    assert before - needed() == freed


def test_prune_takes_the_runs_of_a_pattern(
    call: Call, call_json: CallJson, long: str, url: str
) -> None:
    with holdfast.open(url) as opened:
        for name in ("sweep-1", "sweep-2"):
            opened.fork("long/latest", name).save({"w": np.zeros(3)}, step=70, metrics={"loss": 9})
    header, *rows, counts = call("prune", "sweep-*", "--last", 1, "--dry-run").stdout.splitlines()
    assert header.split()[:3] == ["run", "phase", "step"]
    assert [row.split()[:3] for row in rows] == [
        [run, "main", step] for run in ("sweep-1", "sweep-2") for step in ("60", "70")
    ]
    assert counts == "2 checkpoints kept, 2 would go"
    pruned = call_json("prune", "*[g-]*", "--last", 1)
    assert [(one["run"], len(one["evicted"])) for one in pruned] == [
        ("long", 4),
        ("sweep-1", 1),
        ("sweep-2", 1),
    ]
    assert steps_at(None, "long") == [20, 60]
    call("run", "rm", "sweep-1", "--yes", "--reason", "over")
    done = call("prune", "*[g-]*", "--dry-run")
    assert done.stdout == "0 checkpoints kept, 0 would go\n"
    assert done.stderr == (
        "passed over, dropped or without a retention policy: long, sweep-1, sweep-2\n"
    )
    assert "no run has a name like this" in call("prune", "swep-*", status=4).stderr


def test_a_run_that_cannot_be_read_keeps_no_other_run_from_its_pruning(
    call: Call, call_json: CallJson, long: str, url: str
) -> None:
    with holdfast.open(url) as opened:
        opened.fork("long/latest", "broken")
    (log,) = Path(url.removeprefix("file://")).glob("runs/broken/log")
    (log / f"{0:020}").write_bytes(b"garbage")
    shutil.rmtree(log.parent / "snapshots", ignore_errors=True)
    done = call("prune", "*", "--last", 1, status=6)
    assert steps_at(None, "long") == [20, 60]
    assert "4 would go" in done.stdout or "4 evicted" in done.stdout
    assert done.stderr.startswith("damaged: broken: ")
    assert [one["run"] for one in call_json("prune", "*", "--last", 1, status=6)] == [
        "demo",
        "long",
    ]
    call("prune", "broken", "--last", 1, status=6)


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (["--last", 1], [20, 60]),
        (["--best", 3], [10, 20, 30, 60]),
        (["--every", 30], [20, 30, 60]),
        (["--days", 1], [10, 20, 30, 40, 50, 60]),
        (["--last", 1, "--every", 40], [20, 40, 60]),
    ],
)
def test_every_rule(rule: list[Any], left: list[int], call: Call, call_json, long: str) -> None:
    call("prune", long, *rule)
    assert steps_at(None, long) == left


def test_a_dry_run_changes_nothing(call: Call, call_json: CallJson, long: str) -> None:
    before = call("log", long).stdout
    printed = call("prune", long, "--last", 2, "--dry-run").stdout
    assert printed.splitlines()[-1] == "3 checkpoints kept, 3 would go"
    assert call("log", long).stdout == before
    shape = call_json("prune", long, "--last", 2, "--dry-run")
    assert set(shape) == {"run", "dry_run", "freed_bytes", "kept", "thinned", "evicted"}
    assert (shape["run"], shape["dry_run"]) == ("long", True)
    assert [one["step"] for one in shape["kept"]] == [20, 50, 60]
    assert shape["evicted"][0]["ref"] == "long/main/step00000010"
    assert shape["evicted"][0]["reasons"] == ["not among last 2 of phase main; no pin"]
    assert call_json("prune", long, "--last", 2)["dry_run"] is False
    assert steps_at(None, long) == [20, 50, 60]


def test_the_policy_of_the_run_counts_without_another(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("kept", retention=Retention(last=2))
        for step in (1, 2, 3):
            run.save({"w": step}, step=step)
        run.retention.undo()
    assert "3 checkpoints kept, 0 evicted" in call("prune", "kept").stdout
    assert "brought back by hand" in call("prune", "kept").stdout


def test_without_any_policy_nothing_goes(call: Call, call_json: CallJson, long: str) -> None:
    assert "keeps everything" in call("prune", long, status=3).stderr
    call("prune", long, "--last", 0, status=2)
    assert len(steps_at(None, long)) == 6


def test_the_best_of_a_run_without_a_monitor_is_nothing(
    call: Call, call_json: CallJson, url: str
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("blind")
        for step in (1, 2, 3):
            run.save({"w": step}, step=step)
    assert "which checkpoint is best" in call("prune", "blind", "--best", 2, status=3).stderr
    assert steps_at(None, "blind") == [1, 2, 3]


def test_an_empty_run(call: Call) -> None:
    call("run", "create", "empty")
    assert call("prune", "empty", "--last", 1).stdout == "0 checkpoints kept, 0 evicted\n"


# undo


def test_undo_brings_back_the_last_eviction(call: Call, call_json: CallJson, long: str) -> None:
    call("prune", long, "--last", 5)
    call("prune", long, "--last", 3)
    printed = call("undo", long).stdout
    assert printed.startswith("back: long/main/step00000030  ")
    assert len(printed.splitlines()) == 1
    assert steps_at(None, long) == [20, 30, 40, 50, 60]
    assert "back: long/main/step00000010" in call("undo", long).stdout
    assert "nothing was evicted" in call("undo", long, status=4).stderr


@pytest.mark.parametrize("form", ["main/step40", "long/main/step00000040", "id", "short", "sha"])
def test_undo_of_one(form: str, call: Call, call_json: CallJson, long: str) -> None:
    (gone,) = [one for one in call_json("prune", long, "--last", 1)["evicted"] if one["step"] == 40]
    digits = gone["id"].removeprefix("sha256:")
    ref = {"id": digits, "short": f"long/{digits[:12]}", "sha": gone["id"]}.get(form, form)
    (back,) = call_json("undo", long, ref)
    assert (back["step"], back["id"]) == (40, gone["id"])
    assert steps_at(None, long) == [20, 40, 60]


def test_undo_of_several(call: Call, call_json: CallJson, long: str) -> None:
    call("prune", long, "--last", 1)
    back = call_json("undo", long, "main/step50", "main/step10", "main/step50")
    assert [one["step"] for one in back] == [50, 10]
    assert steps_at(None, long) == [10, 20, 50, 60]


@pytest.mark.parametrize("ref", ["main/step30", "main/step77", "other/step10", "deadbeef", "x"])
def test_undo_of_what_is_not_evicted(ref: str, call: Call, call_json, long: str) -> None:
    call("prune", long, "--last", 4)  # only 10 goes
    assert "no evicted checkpoint" in call("undo", long, ref, status=4).stderr
    assert steps_at(None, long) == [20, 30, 40, 50, 60]


def test_near_names_of_what_is_evicted(call: Call, long: str) -> None:
    call("prune", long, "--last", 4)
    assert "'main/step10'" in call("undo", long, "main/stp10", status=4).stderr


@pytest.mark.parametrize("ref", ["long/main/step30", "main/step00000030", "long/main/step12"])
def test_no_other_step_is_suggested(ref: str, call: Call, long: str) -> None:
    call("prune", long, "--last", 4)  # only 10 goes
    refused = call("undo", long, ref, status=4).stderr
    assert "step10" not in refused
    assert ("a checkpoint that is kept" in refused) == ("30" in ref)


def test_undo_names_what_is_superseded_by_its_id(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("back")
        first = run.save({"w": 0}, step=1)
        second = run.save({"w": 1}, step=2)
        run.restore(first)
        run.save({"w": 2}, step=3)
    call("prune", "back", "--last", 1)
    told = call("undo", "back", "main/step2").stdout
    assert told == f"back: back/{second.digest.short}  {second.digest.short}\n"
    call("show", told.split()[1])


def test_undo_of_a_step_that_went_twice_asks_for_the_id(
    call: Call, call_json: CallJson, url: str
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("back")
        run.save({"w": 0}, step=1)
        first = run.save({"w": 1}, step=2)
        run.restore(run.checkpoints()[0])
        run.save({"w": 2}, step=2)
        run.save({"w": 3}, step=3)
    call("prune", "back", "--last", 1)
    assert "by its id" in call("undo", "back", "main/step2", status=4).stderr
    (back,) = call_json("undo", "back", first.digest.hex()[:8])
    assert back["id"] == f"sha256:{first.digest.hex()}"


def test_evict_takes_one_and_undo_brings_it_back(call: Call, call_json, long: str) -> None:
    said = call("rm", f"{long}/main/step30", "--reason", "wrong labels").stdout
    assert said.startswith("evicted: long/main/step00000030  ")
    assert steps_at(None, long) == [10, 20, 40, 50, 60]
    assert "wrong labels" in call("log", long).stdout
    call("undo", long)
    assert steps_at(None, long) == [10, 20, 30, 40, 50, 60]


def test_evict_refuses_what_is_protected(call: Call, call_json, long: str) -> None:
    for ref, reason in (("best", "best/loss"), ("latest", "latest")):
        refused = call("rm", f"{long}/{ref}", "--reason", "try", status=5)
        assert reason in refused.stderr
    assert steps_at(None, long) == [10, 20, 30, 40, 50, 60]


UNTIL = "2100-01-31"


def test_a_hold_is_shown_where_pins_are_and_refuses(
    call: Call, call_json: CallJson, long: str
) -> None:
    said = call("hold", f"{long}/main/step10", "--until", UNTIL, "--reason", "an audit").stdout
    assert said == "held: long/main/step00000010 until 2100-01-31T00:00:00.000Z\n"
    (held,) = call_json("run", "show", long)["holds"]
    assert held["ref"] == "long/main/step00000010"
    assert (held["until"], held["reason"]) == ("2100-01-31T00:00:00.000Z", "an audit")
    assert "@" in held["author"]
    assert call_json("ls", long)[0]["marks"] == ["held until 2100-01-31 00:00:00Z"]
    shown = call("run", "show", long).stdout
    assert re.search(r"^holds +long/main/step00000010 until 2100-01-31T.*: an audit$", shown, re.M)
    refused = call("rm", f"{long}/main/step10", "--reason", "no use", status=5).stderr
    assert "held until 2100-01-31 00:00:00Z: an audit" in refused
    refused = call("run", "rm", long, "--reason", "no use", "--yes", status=5).stderr
    assert "a hold forbids this; found held until 2100-01-31 00:00:00Z: an audit" in refused
    assert "`holdfast hold --off` ends a hold early" in refused
    kept = call("prune", long, "--last", 1).stdout.splitlines()
    assert "kept  held until 2100-01-31 00:00:00Z: an audit" in kept[1]
    assert "hold main/step00000010 until 2100-01-31 00:00:00Z: an audit" in call("log", long).stdout


def test_off_ends_a_hold_on_a_run(call: Call, call_json: CallJson, long: str) -> None:
    until = "2100-01-31T12:00+02:00"
    assert call_json("hold", long, "--until", until, "--reason", "an audit") | {
        "set": "",
        "author": "",
    } == {
        "ref": "long",
        "until": "2100-01-31T10:00:00.000Z",
        "reason": "an audit",
        "author": "",
        "set": "",
    }
    assert call("hold", long, "--off", "--reason", "no audit").stdout == "not held: long\n"
    assert call_json("run", "show", long)["holds"] == []
    assert "no such hold" in call("hold", long, "--off", "--reason", "x", status=4).stderr
    call("run", "rm", long, "--reason", "no use", "--yes")


def test_a_hold_needs_a_date_or_off(call: Call, long: str) -> None:
    for given, text in (
        ([], "give --until, or --off to end a hold"),
        (["--until", UNTIL, "--off"], "give --until, or --off to end a hold"),
        (["--until", "soon"], "'soon' is not a date such as 2027-01-31"),
    ):
        assert text in call("hold", long, *given, "--reason", "x", status=2).stderr
    assert "use `holdfast hold --off`" in call("unhold", long, status=2).stderr


def test_log_of_all_runs_shows_who_did_what_newest_first(
    call: Call, call_json: CallJson, long: str, url: str
) -> None:
    with holdfast.open(url) as opened:
        opened.fork("long/latest", "other")
        opened.run(long).retention.evict(opened.checkpoint(f"{long}/main/step10"), "no use")
        other = opened.run("other")
        other.pins.tags.set("paper", opened.checkpoint("other/latest"))
        other.pins.gates.set("end", opened.checkpoint("other/latest"))
        other.releases.publish("1.0.0", opened.checkpoint("other/latest"))
        other.releases.publish("1.1.0", opened.checkpoint("other/latest"))
        other.releases.rollback("1.0.0")
        opened.run("other").retention.drop("done")
    found = call_json("log", "--all", "--action", "drop,evict,tag")
    assert [(one["run"], [act["action"] for act in one["actions"]]) for one in found] == [
        ("other", ["run.hide"]),
        ("other", ["tag.set"]),
        ("long", ["checkpoint.evict"]),
        ("demo", ["tag.set"]),
    ]
    for words, times in (("gate", 1), ("release", 3), ("artifact", 0), ("pin", 3)):
        acts = call_json("log", "--all", "--action", words)
        assert [one["run"] for one in acts] == ["other"] * times, words
    assert all("@" in one["author"] for one in found)
    # A second time from what this machine noted, and cut by a count.
    newest = call("log", "--all", "--action", "drop,evict,tag", "-n", 2)
    assert newest.stderr == "only the newest 2; -n COUNT shows more\n"
    assert [line.split()[3] for line in newest.stdout.splitlines()[1:]] == ["other", "other"]
    text = call("log", long, "--action", "evict").stdout
    assert "evict main/step00000010 (no use)" in " ".join(text.split())
    assert call_json("log", "--all", "--since", "0", "--action", "evict") == []
    assert len(call_json("log", "--all", "--since", "1h", "--action", "evict")) == 1
    assert (
        "no action is named 'delete'" in call("log", "--all", "--action", "delete", status=2).stderr
    )
    assert "give RUN, or --all" in call("log", status=2).stderr


def test_log_of_all_runs_does_not_open_what_is_older(
    call_json: CallJson, long: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_json("log", "--all", "--since", "1h")
    opened: list[str] = []
    begin = RunLog.open

    def noted(self: RunLog, **given: Any) -> Any:
        opened.append(self.run_id)
        return begin(self, **given)

    monkeypatch.setattr(RunLog, "open", noted)
    monkeypatch.setattr(history_listing, "clock", SimpleNamespace(time=lambda: time.time() + 7200))
    assert call_json("log", "--all", "--since", "1h") == []
    assert opened == []


def test_du_counts_by_groups_and_tells_by_its_status_what_is_over(
    call: Call, call_json: CallJson, long: str, url: str
) -> None:
    with holdfast.open(url) as opened:
        for name, project in (("one", "vision"), ("two", "vision"), ("three", "text")):
            run = opened.create_run(name, seed=1, owner="ana", project=project)
            state = {"w": np.random.default_rng(3).random(50_000 if project == "vision" else 9)}
            run.save(state, step=1)
    by_run = {one["run"]: one for one in call_json("du", "--by", "run")}
    assert by_run["one"]["needed_bytes"] > 400_000 > by_run["one"]["own_bytes"]
    by_project = {one["project"]: one for one in call_json("du", "--by", "project")}
    # Both runs have the same chunks, which their project needs once.
    assert 400_000 < by_project["vision"]["own_bytes"] < 410_000
    assert {"ana"} < {one["owner"] for one in call_json("du", "--by", "owner")}
    assert "main" in {one["phase"] for one in call_json("du", "--by", "phase")}
    over = call("du", "--by", "project", "--over", "400kB", status=10).stdout
    assert [line.split()[0] for line in over.splitlines()] == ["project", "vision"]
    assert "no project needs more" in call("du", "--by", "project", "--over", "1 MiB").stderr
    assert "is not a size" in call("du", "--over", "much", status=2).stderr
    assert "owner, project, run, phase" in call("du", "--by", "host", status=3).stderr
    with holdfast.open(url) as opened:
        opened.run("one").save({"w": np.zeros(3)}, step=2)  # nothing stops a save
