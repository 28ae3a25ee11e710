"""`artifact add` and `ls`, and what else is shown and pulled that is no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from tests.registry.cli.calling import Call


def test_add(call: Call, torch_file: Path, tmp_path: Path) -> None:
    told = call("artifact", "add", "demo", "grp", torch_file).stdout
    assert told.startswith("added: demo/artifacts/grp  ")
    call("artifact", "add", "demo", "grp", torch_file)
    (tmp_path / "seeds.bin").write_bytes(os.urandom(5000))
    opaque = call("artifact", "add", "demo", "seeds", tmp_path / "seeds.bin").stdout
    assert "stored as an opaque file; nothing in it was read" in opaque
    refused = call("artifact", "add", "demo", "grp", tmp_path / "seeds.bin", status=5)
    assert "other content" in refused.stderr
    call("artifact", "add", "demo", "a/b", torch_file, status=3)
    call("artifact", "add", "demo", "gone", tmp_path / "absent", status=3)


def test_ls(call: Call, torch_file: Path, call_json: Callable[..., Any]) -> None:
    assert call("artifact", "ls", "demo").stderr == "no artifacts yet\n"
    added = call_json("artifact", "add", "demo", "grp", torch_file)
    assert added["format"] == "torch"
    header, row = call("artifact", "ls", "demo").stdout.splitlines()
    assert header.split() == ["artifact", "id", "age"]
    assert row.split()[0] == "grp"
    (found,) = call_json("artifact", "ls", "demo")
    assert set(found) == {"ref", "id", "name", "set", "source", "metrics"}
    assert found["ref"] == "demo/artifacts/grp"
    assert call_json("run", "show", "demo")["artifacts"] == ["grp"]


def test_an_artifact_is_shown_and_pulled(
    call: Call, torch_file: Path, tmp_path: Path, call_json: Callable[..., Any]
) -> None:
    call("artifact", "add", "demo", "grp", torch_file)
    shown = call("show", "demo/artifacts/grp").stdout
    assert shown.startswith("ref      demo/artifacts/grp\n")
    assert "kind     artifact" in shown
    assert "source" not in shown
    data = os.urandom(5000)
    (tmp_path / "seeds.bin").write_bytes(data)
    call("artifact", "add", "demo", "seeds", tmp_path / "seeds.bin")
    assert "file     seeds.bin (opaque" in call("show", "demo/artifacts/seeds").stdout
    call("pull", "demo/artifacts/seeds", "--to", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert "'grp'" in call("show", "demo/artifacts/grpp", status=4).stderr
    assert call_json("show", "demo/artifacts/seeds")["file"] == "seeds.bin"


def test_entries_of_a_pool_and_companions_are_shown_and_pulled(
    call: Call, url: str, tmp_path: Path, call_json: Callable[..., Any]
) -> None:
    with holdfast.open(url) as opened:
        run = opened.run("demo")
        run.pool.promote(run.latest())
        state = {"model": {"x": 1.0}}
        run.save(state, step=30, phase=2, companions={"reference": {"model": {"y": 2.0}}})
    found = call_json("show", "demo/pool/v0001")
    assert (found["kind"], found["ref"]) == ("pool", "demo/pool/v0001")
    assert found["source"] == "demo/phase2/step00000020"
    assert set(found["metrics"]) == {"mu", "sigma"}
    assert "kind     pool" in call("show", "demo/pool/v0001").stdout
    beside = call_json("show", "demo/latest/companions/reference")
    assert beside["kind"] == "companion"
    assert call_json("show", beside["source"])["ref"] == "demo/phase2/step00000030"
    assert call_json("show", beside["ref"])["id"] == beside["id"]
    call("show", "demo/latest/companions/reference")
    call("pull", "demo/latest/companions/reference", "--to", tmp_path / "r.pt")
    call("pull", "demo/pool/v1", "--only", "model", "--to", tmp_path / "p.safetensors")


def test_what_is_only_of_checkpoints_says_so(call: Call, torch_file: Path) -> None:
    call("artifact", "add", "demo", "grp", torch_file)
    for command in (
        ["tag", "set", "demo/artifacts/grp", "x"],
        ["metric", "add", "demo/artifacts/grp", "a=1"],
        ["release", "publish", "demo/artifacts/grp", "1.0.0"],
        ["gate", "set", "demo", "x", "demo/artifacts/grp"],
    ):
        assert "no checkpoint" in call(*command, status=3).stderr
