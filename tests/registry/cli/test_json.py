"""The shapes that `--json` prints; `docs/cli.md` promises them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.registry.cli.calling import RECORD, Call, CallJson

RUN = {
    *("last_heard", "waited_share", "failed_saves", "damaged", "reason"),
    *("run", "status", "created", "seed", "config", "config_hash", "environment", "monitors"),
    *("checkpoints", "superseded", "latest", "best", "tags", "writer", "commits", "head"),
    *("evicted", "gates", "releases", "artifacts", "streams", "pool"),
    *("best_values", "best_steps", "inherited", "best_step", "total_steps"),
    *("owner", "project", "labels", "holds", "notes", "merged_from"),
    "phases",
    "dropped",
    "freed",
    "journal",
    "preset",
    "forks",
    "phase",
    "parent",
}


def test_a_planned_end_is_told_with_what_is_done(call: Call, call_json: CallJson, url: str) -> None:
    call("run", "create", "planned", "--total-steps", "40")
    with holdfast.open(url) as opened:
        opened.run("planned").save({"w": np.ones(2)}, step=10)
    assert call_json("run", "show", "planned")["total_steps"] == 40
    assert "10 of 40 steps, 25%; 30 steps left" in call("run", "show", "planned").stdout


def test_ls(call_json: CallJson) -> None:
    first, second = call_json("ls", "demo")
    assert set(first) == RECORD
    assert first["metrics"] == {"loss": 0.5, "nan": "nan"}
    assert (first["phase"], second["phase"]) == ("main", 2)
    assert first["meta"] == {"note": "hi"}
    assert second["marks"] == ["latest", "best", "tags/keeper"]
    assert second["id"].startswith("sha256:")
    assert second["created"].endswith("Z")


def test_show(call_json: CallJson) -> None:
    shown = call_json("show", "demo", "--tensors")
    assert set(shown) == RECORD | {"components", "lossy", "file", "tensors", "pull", "load"}
    assert set(shown["components"][0]) == {"name", "digest", "tensors", "size_bytes"}
    (tensor,) = shown["tensors"]
    assert set(tensor) == {"path", "dtype", "original", "shape", "size_bytes", "content"}
    assert (tensor["path"], tensor["shape"]) == ("model/w", [600])
    assert "tensors" not in call_json("show", "demo")


def test_runs(call_json: CallJson) -> None:
    (listed,) = call_json("run", "ls")
    shown = call_json("run", "show", "demo", "--forks")
    assert listed == shown
    assert set(shown) == RUN
    assert shown["seed"] == "0x000000000000002a"
    assert shown["config"] == {"lr": 0.1}
    assert shown["best"] == {"loss": "demo/phase2/step00000020"}
    assert set(call_json("run", "create", "new")) == RUN


def test_a_sweep_is_compared_by_its_best_values(call: Call, call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as opened:
        for lr, losses in ((0.5, (0.9, 0.3, 0.7)), (0.01, (0.8, 0.6, 0.5)), (2.0, ())):
            run = opened.create_run(
                f"sweep-{lr}",
                config={"lr": lr},
                monitor=holdfast.Monitor(metric="loss", mode="min"),
            )
            for step, loss in enumerate(losses, 1):
                run.save({"w": step}, step=step, metrics={"loss": loss})
    listed = {one["run"]: one for one in call_json("run", "ls")}
    assert listed["sweep-0.5"]["best_values"] == {"loss": 0.3}
    assert listed["sweep-0.5"]["best_steps"] == {"loss": 2}
    assert listed["sweep-2.0"]["best_values"] == {"loss": None}
    lines = call("run", "ls", "--columns", "run,config.lr,loss,best_steps.loss", "--sort", "loss")
    assert [line.split() for line in lines.stdout.splitlines()[1:4]] == [
        ["demo", "0.1", "0.25", "20"],
        ["sweep-0.5", "0.5", "0.3", "2"],
        ["sweep-0.01", "0.01", "0.5", "3"],
    ]
    best = call("run", "ls", "--columns", "run", "--sort", "best").stdout.split()
    assert best[1:] == ["demo", "sweep-0.5", "sweep-0.01", "sweep-2.0"]
    rows = list(csv.DictReader(call("run", "ls", "--csv").stdout.splitlines()))
    found = {one["run"]: (one["best_values.loss"], one["best_step"]) for one in rows}
    assert (found["sweep-0.5"], found["sweep-2.0"]) == (("0.3", "2"), ("", ""))


def test_log(call_json: CallJson) -> None:
    commits = call_json("log", "demo")
    assert [commit["n"] for commit in commits] == [3, 2, 1, 0]
    assert set(commits[0]) == {"n", "time", "author", "prev", "actions"}
    assert commits[-1]["prev"] is None
    assert commits[-1]["actions"][0]["config"] == {"lr": 0.1}
    added = commits[-2]["actions"][-1]
    assert added["action"] == "checkpoint.add"
    assert added["metrics"] == {"loss": 0.5, "nan": "nan"}
    assert added["meta"] == {"note": "hi"}


def test_diff(call_json: CallJson) -> None:
    found = call_json("diff", "demo/main/step10", "demo")
    assert set(found) == {"before", "after", "same", "components", "tensors", "values", "metrics"}
    assert found["metrics"][0] == {"metric": "loss", "before": 0.5, "after": 0.25}
    assert found["metrics"][1:] == [{"metric": "nan", "before": "nan", "after": None}]
    assert found["same"] is False
    (tensor,) = found["tensors"]
    assert (tensor["kind"], tensor["path"]) == ("changed", "model/w")
    assert found["values"] == [{"kind": "changed", "path": "epoch", "before": 1, "after": 2}]


def test_attest(call_json: CallJson, tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", w=np.zeros(600, np.float32))
    found = call_json("attest", tmp_path / "f.npz", "demo", status=1)
    assert found == {
        "whole": False,
        "ref": "demo/phase2/step00000020",
        "id": found["id"],
        "format": "npz",
        "counts": {"changed": 1, "values": 0, "uncompared": 0},
        "paths": {"changed": ["model/w"], "values": [], "uncompared": []},
        "absent": ["epoch"],
        "equal_bytes": 0,
        "looked_at": 1,
        "left": 0,
        "unopened": 0,
        "unread": {},
    }


def test_verify_and_doctor(call_json: CallJson) -> None:
    report = call_json("verify", "--deep")
    assert set(report) == {
        *("ok", "runs", "unchanged", "checkpoints", "objects", "bytes_checked", "data"),
        *("findings", "standing", "vouched"),
    }
    assert report["ok"] is True
    assert set(report["data"]) == {
        *("packs", "packs_read", "packs_noted", "pack_bytes", "bytes_read", "bytes_noted"),
        *("chunks_decoded", "packs_archived"),
    }
    assert call_json("verify")["data"] is None
    found = call_json("doctor")
    assert found["ok"] is True
    assert all(set(check) == {"name", "status", "message"} for check in found["checks"])


def test_push_pull_sync_init(
    call_json: CallJson, torch_file: Path, tmp_path: Path, url: str
) -> None:
    pushed = call_json("push", torch_file, "demo", "--step", 30)
    assert set(pushed) == RECORD | {"components", "lossy", "format", "new"}
    assert (pushed["format"], pushed["new"]) == ("torch", True)
    pulled = call_json("pull", "demo", "--to", tmp_path / "out.pt")
    assert set(pulled) == {"ref", "id", "path", "format", "size_bytes"}
    assert pulled["size_bytes"] == (tmp_path / "out.pt").stat().st_size
    made = call_json("init", tmp_path / "mirror", "--skip-race-probe")
    assert set(made) == {"url", "id", "race_probe", "compression", "keyframe_every"}
    synced = call_json("sync", url, tmp_path / "mirror")
    assert set(synced) == {"runs", "bytes_copied"}
    assert synced["runs"][0]["run"] == "demo"


def test_empty_registry(call_json: CallJson, tmp_path: Path) -> None:
    holdfast.init(tmp_path / "empty", skip_race_probe=True).close()
    for command in (["ls"], ["run", "ls"]):
        assert call_json(*command, "-r", tmp_path / "empty") == []


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.zarr", "x.bin"])
def test_the_formats_that_are_printed_are_those_of_the_document(
    name: str, call: Call, call_json: CallJson, tmp_path: Path, torch_file: Path
) -> None:
    file, document = tmp_path / name, Path(__file__).parents[3] / "docs" / "cli.md"
    if name == "x.bin":
        file.write_bytes(b"z")
    elif name == "x.pt":
        file = torch_file
    else:
        call("pull", "demo/phase2/step20", "--only", "model", "--to", file)
    lines = document.read_text().splitlines()
    for command in (
        ["push", file, "new", "--step", 1, "--create"],
        ["push", file, "demo", "--artifact", "a"],
    ):
        (line,) = (line for line in lines if line.startswith("| `push` |"))
        formats = line.partition("`format` (")[2].partition(")")[0]
        assert f"`{call_json(*command)['format']}`" in formats.split(", ")
