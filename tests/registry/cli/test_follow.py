"""`follow`: a folder at the newest checkpoint, and a program or an engine that is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.registry.cli.calling import Call

NAMES = ("FOLDER", "REF", "ID", "RUN", "STEP", "PHASE", "REGISTRY")


@pytest.fixture
def policy(url: str) -> str:
    with holdfast.open(url) as reg:
        run = reg.create_run("policy")
        for step in (1, 2):
            run.save({"model": {"w": np.full(4, step, np.float32)}}, step=step)
    return url


def test_a_program_is_told_of_the_newest_version(call: Call, policy: str, tmp_path: Path) -> None:
    script = tmp_path / "told.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        f"told = {{name: os.environ['HOLDFAST_' + name] for name in {NAMES!r}}}\n"
        "files = sorted(os.listdir(sys.argv[1]))\n"
        f"place = pathlib.Path({str(tmp_path / 'told.json')!r})\n"
        "sys.exit(0 if place.exists() else place.write_text(json.dumps([told, files])) and 3)\n"
    )
    words = ["follow", "policy", "--into", tmp_path / "models", "--once"]
    result = call(*words, "--notify", f"{sys.executable} {script} {{folder}} {{{{id}}}}")
    told, files = json.loads((tmp_path / "told.json").read_text())
    assert files == ["README.md", "holdfast.json", "model.safetensors"]
    assert (told["STEP"], told["REF"]) == ("2", "policy/main/step00000002")
    assert told["FOLDER"] == str((tmp_path / "models" / "current").resolve())
    assert told["REGISTRY"] == policy
    assert "the command does not succeed; found exit status 3" in result.stderr  # and again
    assert result.stderr.splitlines()[-1] == "every engine has policy/main/step00000002"


def test_a_version_is_published_before_the_command_runs(
    call: Call, policy: str, tmp_path: Path
) -> None:
    del policy
    shared = tmp_path / "shared"
    words = ["follow", "policy", "--into", tmp_path / "models", "--once"]
    assert "--publish" in call(*words, status=2).stderr
    words += ["--publish", shared]
    assert "a command" in call(*words, "--notify", "vllm", status=2).stderr
    call(*words, "--notify", f"cp {shared}/latest {tmp_path}/told")
    newest = shared / (tmp_path / "told").read_text()
    there = sorted(path.name for path in newest.iterdir())
    assert there == [".holdfast", "model.safetensors"]
    assert call(*words).stderr.endswith("every engine has policy/main/step00000002\n")
    assert [path.name for path in shared.glob("weight_v*")] == [newest.name]


def test_what_cannot_be_told_is_refused(
    call: Call, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del policy
    words = ["follow", "policy", "--into", tmp_path / "models", "--once", "--notify"]
    for more, status, said in (
        (["sglang"], 3, "not the URLs of engines"),
        (["sglang", "--url", "http://169.254.169.254"], 3, "a link-local address"),
        (
            ["sglang", "--url", "http://127.0.0.1:1", "--requests", "drop"],
            2,
            "wait, pause or abort",
        ),
        (["true {fodler}"], 3, "{folder}"),
        (["no-such-program"], 3, "no such command"),
        (["true", "--url", "http://127.0.0.1:1"], 3, "no URL and no key"),
        (["true", "--best"], 3, "monitor"),
    ):
        assert said in call(*words, *more, status=status).stderr
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:1")  # only the command line names one
    assert "not the URLs of engines" in call(*words, "sglang", status=3).stderr
