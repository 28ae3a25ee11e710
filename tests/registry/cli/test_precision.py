"""`push --precision`, and what `show` says of what is lossy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.registry.cli.calling import Call, CallJson


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_push_with_a_precision_says_what_was_lost(call: Call, weights: Path) -> None:
    policies = ("--precision", "*/bias=keep", "--precision", "model/*=bf16")
    pushed = call("push", weights, "demo", "--step", 30, *policies).stdout
    assert pushed.splitlines()[1:] == [
        "with less precision: 1 tensor of float32 as bfloat16, 1.2 KiB instead of 2.3 KiB"
    ]
    again = call("push", weights, "demo", "--step", 30, *policies).stdout
    assert again.startswith("there already: ")
    assert "less precision" not in call("push", weights, "demo", "--step", 31).stdout


def test_one_policy_is_for_every_tensor_but_the_optimizer(
    call: Call, call_json: CallJson, weights: Path
) -> None:
    options = ("push", weights, "demo", "--precision", "fp16")
    (lossy,) = call_json(*options, "--step", 30)["lossy"]
    assert lossy == {
        "original": "float32",
        "dtype": "float16",
        "tensors": 2,
        "size_bytes": 2 * 620,
        "original_size_bytes": 4 * 620,
    }
    (forced,) = call_json(*options, "--step", 31, "--allow-lossy-optimizer")["lossy"]
    assert forced["tensors"] == 8


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("optimizer/*=bf16", "optimizer state would lose precision"),
        ("half", "Did you mean 'fp16'?"),
        ("nothing/*=bf16", "a pattern matches no tensor"),
    ],
)
def test_what_is_refused(call: Call, weights: Path, policy: str, message: str) -> None:
    refused = call("push", weights, "demo", "--step", 30, "--precision", policy, status=3)
    assert message in refused.output
    assert "step00000030" not in call("ls", "demo").stdout


def test_the_hint_names_what_a_command_takes_too(call: Call, weights: Path) -> None:
    lossy = ("push", weights, "demo", "--step", 30, "--precision", "optimizer/*=bf16")
    (hint,) = [line for line in call(*lossy, status=3).stderr.splitlines() if "hint: " in line]
    (option,) = re.findall(r"`(--[a-z-]+)`", hint)
    call(*lossy, option)


def test_a_pattern_is_given_once(call: Call, weights: Path) -> None:
    twice = ("--precision", "fp16", "--precision", "bf16")
    assert "given twice" in call("push", weights, "demo", "--step", 3, *twice, status=2).output


def test_show_marks_what_is_lossy(call: Call, call_json: CallJson, weights: Path) -> None:
    call("push", weights, "demo", "--step", 30, "--precision", "model/weight=bf16")
    call("release", "publish", "demo", "1.0.0", "--only", "model")
    for ref in ("demo", "demo/releases/1.0.0"):
        shown = call("show", ref, "--tensors").stdout
        (line,) = [line for line in shown.splitlines() if line.startswith("lossy")]
        assert line.split(maxsplit=1)[1] == (
            "1 tensor of float32 as bfloat16, 1.2 KiB instead of 2.3 KiB"
        )
        (line,) = [line for line in shown.splitlines() if line.startswith("model/weight")]
        assert "  bfloat16 (was float32, lossy)  " in line
        (line,) = [line for line in shown.splitlines() if line.startswith("model/bias")]
        assert "  float32  " in line
        document = call_json("show", ref, "--tensors")
        assert [one["tensors"] for one in document["lossy"]] == [1]
        said = {one["path"]: (one["dtype"], one["original"]) for one in document["tensors"]}
        assert said["model/weight"] == ("bfloat16", "float32")
        assert said["model/bias"] == ("float32", None)


def test_show_says_nothing_of_what_is_exact(call: Call, call_json: CallJson) -> None:
    assert "lossy" not in call("show", "demo", "--tensors").stdout
    assert call_json("show", "demo")["lossy"] == []


@pytest.mark.parametrize("name", ["x.zarr", "x.pt"])
def test_pull_says_what_is_lossy(call: Call, weights: Path, tmp_path: Path, name: str) -> None:
    call("push", weights, "demo", "--step", 30, "--precision", "model/weight=bf16")
    pulled = call("pull", "demo", "--to", tmp_path / name)
    assert "saved with less precision: 1 tensor of float32 as bfloat16" in pulled.stderr
    call("push", weights, "demo", "--step", 31)
    assert "precision" not in call("pull", "demo", "--to", tmp_path / f"y{name}").output
