"""A run that cannot be read is shown as damaged: it hides no other run, and the status tells."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.backends.base import ObjectInfo
from holdfast.registry.errors import Malformed, NotFound
from holdfast.registry.face import Registry
from holdfast.registry.history.actions import SetStatus
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.values import canonical
from tests.registry.cli.calling import Call, CallJson


@pytest.fixture
def damaged(url: str) -> Path:
    """The first slot of a second run, `bad`, with a byte changed."""
    with holdfast.open(url) as opened:
        opened.create_run("bad").save({"x": np.arange(100)}, step=1)
        opened.create_run("also").save({"y": np.arange(100)}, step=1)
    slot = Path(url) / slot_key("bad", 1)
    slot.write_bytes(slot.read_bytes().replace(b'"step":1', b'"step":2'))
    return slot


def test_run_ls(call: Call, call_json: CallJson, damaged: Path) -> None:
    said = call("run", "ls", status=6)
    rows = {line.split()[0]: line.split()[1] for line in said.stdout.splitlines()[1:]}
    assert rows.pop("demo").startswith("running")
    assert rows == {"also": "running", "bad": "damaged"}
    assert "damaged: bad: runs/bad/log/" in said.stderr
    assert "holdfast verify" in said.stderr
    first, second, third = call_json("run", "ls", status=6)
    assert (first["run"], third["run"]) == ("also", "demo")
    assert "closing digest" in second.pop("error")
    assert second == {"run": "bad", "status": "damaged"}
    assert "error" not in first


def test_the_best_of_many_runs_never_mixes_monitors(
    call: Call, call_json: CallJson, damaged: Path, url: str
) -> None:
    with holdfast.open(url) as opened:
        for name, metric, mode, values in (
            *(("a", "err", "min", (0.3, 0.2, 0.4)), ("b", "err", "min", (0.1, math.nan))),
            *(
                ("c", "acc", "max", (0.5,)),
                ("d", "acc", "max", (0.2, 0.9)),
                ("e", "acc", "max", ()),
            ),
            ("f", "acc", "max", (0.7,)),
        ):
            monitor = holdfast.Monitor(metric=metric, mode=mode)
            run = opened.create_run(f"s-{name}", monitor=monitor)
            for step, value in enumerate(values):
                run.save({"w": np.full(2, step)}, step=step, metrics={metric: value})
        opened.fork("s-b/best", "s-untrained")
        later = opened.fork("s-d/best", "s-later")
        later.save({"w": np.full(2, 9)}, step=7, metrics={"acc": 0.6})
    rows = call_json("ls", "s-*/best")
    assert [row.pop("ref") for row in rows if row["run"] == "s-later"] == [
        "s-later/main/step00000007"  # its own best, not the better one that it inherited
    ]
    rows = [row for row in rows if row["run"] != "s-later"]
    assert [(one["run"], one["step"], one["value"]) for one in rows] == [
        *(("s-d", 1, 0.9), ("s-f", 0, 0.7), ("s-c", 0, 0.5)),
        *(("s-b", 0, 0.1), ("s-a", 1, 0.2)),
    ]
    assert {(one["metric"], one["mode"]) for one in rows[:3]} == {("acc", "max")}
    assert call_json("show", rows[0]["ref"])["metrics"] == {"acc": 0.9}
    said = call("ls", "s-*/best")
    assert [line.split()[0] for line in said.stdout.splitlines()] == [
        *("run", "s-d", "s-f", "s-later", "s-c", "s-b", "s-a")
    ]
    assert said.stderr.splitlines() == [
        "err:min, acc:max are not compared: each is sorted by itself",
        "without a best checkpoint of their own: s-e, s-untrained",
    ]
    assert "not compared" not in call("ls", "s-[ab]/best").stderr
    assert "damaged: bad" in call("ls", "*/best", status=6).stderr
    assert "no run has a name like this" in call("ls", "x*/best", status=4).stderr
    with holdfast.open(url) as opened:
        composite = holdfast.Monitor(metric="mu - 3*sigma", mode="max")
        rated = opened.create_run("rated", monitor=composite)
        rated.save({"w": np.zeros(2)}, step=1, metrics={"mu": 9.0, "sigma": 1.0})
    assert [one["value"] for one in call_json("ls", "rate*/best")] == [6.0]
    assert {one["run"] for one in call_json("ls", "s-[ab]")} == {"s-a", "s-b"}


def test_a_fork_has_its_own_best_in_every_list(
    call: Call, call_json: CallJson, damaged: Path, url: str
) -> None:
    with holdfast.open(url) as opened:
        loss = holdfast.Monitor(metric="loss", mode="min")
        run = opened.create_run("lists", monitor=loss)
        run.save({"w": np.zeros(2)}, step=1, metrics={"loss": 0.5})
        fork = opened.fork("lists/best", "lists-later")
        fork.save({"w": np.ones(2)}, step=2, metrics={"loss": 0.75})
        opened.fork("lists/best", "lists-untrained")
        fields = {row["run"]: row for row in opened.runs_table(where="name~lists").to_pylist()}
        assert [one.name for one in run.history.plot().data] == ["loss", "best loss"]
        (star,) = (one for one in fork.history.plot().data if one.name == "best loss")
        assert (list(star.x), list(star.y)) == ([2], [0.75])
        assert "lists-later/main/step00000002" not in fork._repr_html_()
        assert "main/step00000002" in fork._repr_html_().split("best loss")[1][:60]
    rows = {row["run"]: row for row in call_json("run", "ls", "--where", "name~lists")}
    for name, value, step in (("lists", 0.5, 1), ("lists-later", 0.75, 2)):
        assert (fields[name]["best"], fields[name]["best_step"]) == (value, step)
        assert (rows[name]["best_values"], rows[name]["best_step"]) == ({"loss": value}, step)
        assert rows[name]["best"] == {"loss": f"{name}/main/step{step:08d}"}
    assert [rows[name]["inherited"] for name in ("lists", "lists-later")] == [*({}, {"loss": 0.5})]
    assert fields["lists-untrained"]["best"] is None
    assert rows["lists-untrained"]["best_values"] == {"loss": None}
    assert rows["lists-untrained"]["inherited"] == {"loss": 0.5}
    found = call("run", "ls", "--where", "best=0.5 or metrics.loss=0.5", "--columns", "run").stdout
    assert found.split() == ["run", "lists"]
    shown = {row["run"]: row["metrics"] for row in call_json("diff", "--runs", "lists*")}
    assert shown["lists-later"] == {"loss": 0.75}
    assert call_json("show", "lists-later/best")["metrics"] == {"loss": 0.5}  # a name, no list


def test_run_ls_shows_the_runs_that_fit(call: Call, call_json: CallJson, damaged: Path) -> None:
    said = call("run", "ls", "--where", "name~DEM or name=also", "-n", "2", "--since", "1h")
    assert [line.split()[0] for line in said.stdout.splitlines()[1:]] == ["also", "demo"]
    assert "damaged" not in said.stderr
    assert [
        one["run"] for one in call_json("run", "ls", "--where", "status=damaged", status=6)
    ] == ["bad"]
    assert "no run fits" in call("run", "ls", "--where", "status=completed").stderr
    refused = call("run", "ls", "--where", "name=", status=3).stderr
    assert "character 6 of 'name='" in refused


def test_runs_have_owners_projects_and_labels(call: Call, call_json: CallJson) -> None:
    call("run", "create", "vit", "--owner", "ana", "--project", "vision", "--label", "prod")
    call("run", "create", "det", "--from", "demo/latest", "--owner", "ben", "--project", "vision")
    found = call_json("run", "ls", "--where", "owner=ana and project=vision and labels~prod")
    assert [(one["run"], one["owner"], one["labels"]) for one in found] == [
        ("vit", "ana", ["prod"])
    ]
    assert call_json("run", "show", "vit") == found[0] | {"forks": None}
    shown = call("run", "show", "det").stdout
    assert re.search(r"\nowner +ben\nproject +vision\n", shown)
    assert "labels" not in shown


def test_run_ls_opens_what_changed_and_says_the_rest_as_it_is_now(
    call: Call, call_json: CallJson, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(url) as opened:
        opened.fork("demo/latest", "warm", config={"lr": math.inf, "deep": {"n": 10**5000}})
    first, text = call_json("run", "ls"), call("run", "ls", "--columns", "run,status,best_values")
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "run", None)  # nothing is opened
        assert call_json("run", "ls") == first
        assert call("run", "ls", "--columns", "run,status,best_values").stdout == text.stdout
        assert [
            one["run"] for one in call_json("run", "ls", "--where", "created > 2020-01-01")
        ] == [
            "demo",
            "warm",
        ]
    assert first[0]["forks"] == ["warm"]
    with monkeypatch.context() as patched:
        patched.setenv("HOLDFAST_JOURNAL", f"{url}.journal")
        assert call_json("run", "ls")[0]["journal"] is not None
    with holdfast.open(url) as opened:
        opened.run("warm").retention.drop("a mistake")
        opened.fork("demo/latest", "cold")
    said = call("run", "ls", "--max-age", "1h")
    assert re.fullmatch(r"2 runs as of \d{4}-.*Z or later\n", said.stderr)
    assert "warm  forked" in said.stdout
    assert call_json("run", "ls")[1]["forks"] == ["cold", "warm"]
    assert "warm  dropped" in call("run", "ls").stdout


def test_ls(call: Call, call_json: CallJson, damaged: Path) -> None:
    said = call("ls", status=6)
    lines = said.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["also", "bad", "demo", "demo"]
    assert lines[1].endswith("damaged")
    assert {one["run"] for one in call_json("ls", status=6)} == {"also", "demo"}
    assert "damaged: bad" in call("ls", "--json", status=6).stderr
    # A run that is named is read or refused.
    assert call("ls", "bad", status=6).stdout == ""
    call("ls", "demo")


def test_du(call: Call, call_json: CallJson, damaged: Path) -> None:
    lines = call("du", status=6).stdout.splitlines()[1:4]
    assert [line.split()[0] for line in lines] == ["also", "bad", "demo"]
    found = call_json("du", status=6)
    assert [one["run"] for one in found["runs"]] == ["also", "demo"]
    assert "closing digest" in found["damaged"]["bad"]
    call("du", "bad", status=6)
    call("du", "demo")
    call("du", "absent", status=4)


def test_a_run_of_a_newer_version_has_the_status_of_that(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        state = opened.create_run("newer").manifest
        line = commit_line(state, [SetStatus(status="failed")]).encode()
    newer = line.replace(b'"action":"run.status"', b'"action":"run.dance"')
    (Path(url) / slot_key("newer", 1)).write_bytes(join_lines([newer]))
    for command in (("run", "ls"), ("ls",), ("du",)):
        said = call(*command, status=8)
        assert "demo" in said.stdout
        assert "found run.dance" in said.stderr
    call("run", "show", "demo")


def _manifests(opened: holdfast.Registry) -> list[ObjectInfo]:
    return list(opened.handle.store.backend.list("manifests/"))


def _kept(opened: holdfast.Registry, name: str) -> list[holdfast.Checkpoint]:
    return opened.run(name).checkpoints()


def test_a_checkpoint_by_its_id_alone(url: str, damaged: Path, call: Call) -> None:
    with holdfast.open(url) as opened:
        demo = opened.run("demo").latest()
        assert demo is not None
        assert opened.checkpoint(demo.digest.hex()).ref == demo.ref
        stored = {one.key.split("/")[2].partition(".")[0] for one in _manifests(opened)}
        readable = {ck.digest.hex() for name in ("demo", "also") for ck in _kept(opened, name)}
        (of_bad,) = stored - readable
        with pytest.raises(Malformed, match=r"in the runs that can be read.*bad") as caught:
            opened.checkpoint(of_bad)
        assert caught.value.exit_code == 6
        with pytest.raises(NotFound, match="no checkpoint with this id"):
            opened.checkpoint("0" * 16)  # no state has it, whatever the damaged run says
        with pytest.raises(NotFound, match="Did you mean 'demo'"):
            opened.run("demmo")
    call("show", "--stats", demo.digest.hex()[:12])


def test_a_fork_of_a_damaged_run(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.fork("demo/latest", "warm")
    slot = Path(url) / slot_key("demo", 0)
    slot.write_bytes(slot.read_bytes()[:-1])
    assert "which cannot be read" in call("log", "warm", "--graph").stdout
    call("run", "show", "warm")


def test_times_beyond_the_calendar(call: Call, call_json: CallJson, url: str) -> None:
    """A writer's clock may say anything: the number is shown."""
    slot = Path(url) / slot_key("demo", 0)
    (line,) = split_lines(slot.read_bytes(), where="x")
    body = json.loads(line)
    odd = Path(url) / slot_key("odd", 0)
    odd.parent.mkdir(parents=True)
    odd.write_bytes(join_lines([canonical.encode(body | {"run": "odd", "time_ms": 2**53})]))
    assert "in the future" in call("run", "ls").stdout
    assert "9007199254740992 ms" in call("run", "show", "odd").stdout
    assert call_json("run", "show", "odd")["created"] == 2**53
    assert "9007199254740992 ms" in call("log", "odd").stdout
    assert call_json("log", "odd")[0]["time"] == 2**53


def test_legal_integers_of_any_length(call: Call, call_json: CallJson, url: str) -> None:
    huge = 10**5000
    with holdfast.open(url) as opened:
        run = opened.create_run("huge", config={"n": huge, huge: [huge], "mixed": ["a", 1]})
        state = {"x": np.arange(100), "n": huge, "deep": {"k": [huge], huge: 1}}
        run.save(state, step=1, meta={"n": huge, huge: (huge,)})
        run.save({**state, "n": huge + 1}, step=2)
        run.streams["rows"].append([{"step": 1, "n": huge}])
    for command in (
        *(("run", "ls"), ("ls",), ("ls", "huge"), ("run", "show", "huge"), ("log", "huge")),
        *(
            ("show", "huge"),
            ("show", "huge/main/step1"),
            ("show", "--stats", "huge"),
            ("du", "huge"),
        ),
        *(("diff", "huge/main/step1", "huge/main/step2"), ("verify", "--deep")),
        ("stream", "read", "huge", "rows"),
    ):
        call(*command)
        call_json(*command)
    assert int(call_json("show", "huge/main/step1")["meta"]["n"], 16) == huge
    assert int(call_json("run", "show", "huge")["config"]["n"], 16) == huge
    assert int(call_json("stream", "read", "huge", "rows")[0]["n"], 16) == huge
    assert "bits)" in call("diff", "huge/main/step1", "huge/main/step2").stdout
    assert "a, 1" in call("run", "show", "huge").stdout
