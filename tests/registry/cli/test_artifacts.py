"""`push --artifact`, `ls RUN/pins`, and other states that are no checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from tests.registry.cli.calling import Call


def test_add(call: Call, torch_file: Path, tmp_path: Path) -> None:
    told = call("push", torch_file, "demo", "--artifact", "grp").stdout
    assert told.startswith("pushed: demo/artifacts/grp  ")
    call("push", torch_file, "demo", "--artifact", "grp")
    (tmp_path / "seeds.bin").write_bytes(os.urandom(5000))
    opaque = call("push", tmp_path / "seeds.bin", "demo", "--artifact", "seeds").stdout
    assert "stored as an opaque file; nothing in it was read" in opaque
    refused = call("push", tmp_path / "seeds.bin", "demo", "--artifact", "grp", status=5)
    assert "other content" in refused.stderr
    call("push", torch_file, "demo", "--artifact", "a/b", status=3)
    call("push", tmp_path / "absent", "demo", "--artifact", "gone", status=3)
    mixed = call("push", torch_file, "demo", "--artifact", "x", "--step", 1, status=2)
    assert "--artifact excludes --step" in mixed.stderr


def test_one_list_has_every_pin(
    call: Call, call_json: Callable[..., Any], torch_file: Path
) -> None:
    call("push", torch_file, "demo", "--artifact", "grp")
    call("gate", "set", "demo", "first", "demo/main/step10")
    call("release", "publish", "demo", "1.0.0")
    pins = call_json("ls", "demo/pins")
    assert [one["ref"].partition("/")[2] for one in pins] == [
        *("tags/keeper", "gates/first", "releases/1.0.0", "artifacts/grp"),
    ]
    assert all(call_json("show", one["ref"])["id"] == one["id"] for one in pins)
    assert call_json("ls", "demo/tags") == pins[:1]
    assert "expected pins, tags" in call("ls", "demo/pinz", status=4).stderr


def test_ls(call: Call, torch_file: Path, call_json: Callable[..., Any]) -> None:
    assert call("ls", "demo/artifacts").stderr == "no artifacts yet\n"
    added = call_json("push", torch_file, "demo", "--artifact", "grp")
    assert added["format"] == "torch"
    header, row = call("ls", "demo/artifacts").stdout.splitlines()
    assert header.split() == ["pin", "checkpoint", "id", "age", "marks"]
    assert row.split()[:2] == ["artifacts/grp", "-"]
    (found,) = call_json("ls", "demo/artifacts")
    assert (found["kind"], found["name"]) == ("artifact", "grp")
    assert found["ref"] == "demo/artifacts/grp"
    assert call_json("run", "show", "demo")["artifacts"] == ["grp"]


def test_an_artifact_is_shown_and_pulled(
    call: Call, torch_file: Path, tmp_path: Path, call_json: Callable[..., Any]
) -> None:
    call("push", torch_file, "demo", "--artifact", "grp")
    shown = call("show", "demo/artifacts/grp").stdout
    assert shown.startswith("ref      demo/artifacts/grp\n")
    assert "kind     artifact" in shown
    assert "source" not in shown
    data = os.urandom(5000)
    (tmp_path / "seeds.bin").write_bytes(data)
    call("push", tmp_path / "seeds.bin", "demo", "--artifact", "seeds")
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
    call("push", torch_file, "demo", "--artifact", "grp")
    for command in (
        ["tag", "set", "demo/artifacts/grp", "x"],
        ["metric", "add", "demo/artifacts/grp", "a=1"],
        ["release", "publish", "demo/artifacts/grp", "1.0.0"],
        ["gate", "set", "demo", "x", "demo/artifacts/grp"],
    ):
        assert "no checkpoint" in call(*command, status=3).stderr
