"""`stats` and `diff --values`: what people and programs are shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

import holdfast
from holdfast.registry.cli.output import share
from tests.registry.cli.calling import Call, CallJson


@pytest.fixture
def broken(url: str) -> None:
    """A run `bad` of two checkpoints, the second one with NaN and infinity."""
    with holdfast.open(url) as opened:
        run = opened.create_run("bad")
        weights = np.zeros(100, dtype=np.float32)
        state = {"m": {"w": weights, "z": np.array([1 + 2j, 3j])}}
        run.save(state, step=1)
        weights[:5] = [math.nan, math.inf, -math.inf, 3, 4]
        run.save(state, step=2)


def test_stats(call: Call) -> None:
    header, row, total = call("show", "--stats", "demo/main/step10").stdout.splitlines()
    assert header.split() == [
        *("tensor", "dtype", "shape", "min", "max", "mean", "norm", "zeros", "nan", "inf")
    ]
    assert row.split() == [
        *("model/w", "float32", "[600]", "0", "599", "299.5", "8474.67", "0.167%", "0", "0")
    ]
    assert total == ("1 tensor, 2.3 KiB, 600 elements, norm 8474.67, 0.167% zeros, all finite")


def test_what_is_not_finite_stands_out(call: Call, broken: None) -> None:
    _, w, z, total = call("show", "--stats", "bad").stdout.splitlines()
    assert w.split()[6:] == ["5", "95%", "1", "2", "not", "finite"]
    assert z.split()[3:6] == ["-", "-", "0.5+2.5j"]
    assert not z.endswith("finite")
    assert total.endswith("1 NaN, 2 infinite, NOT FINITE: 1 tensor")
    assert "all finite" in call("show", "--stats", "bad", "*/z").stdout
    assert (
        call("show", "--stats", "bad", "*/z", "*/w").stdout == call("show", "--stats", "bad").stdout
    )
    assert "'m/w'" in call("show", "--stats", "bad", "m/ww", status=4).stderr


def test_no_tensors(call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.create_run("plain").save({"n": 1}, step=1)
    assert call("show", "--stats", "plain").stdout.startswith("0 tensors, 0 B, 0 elements, norm 0")


def test_stats_json(call_json: CallJson, broken: None) -> None:
    found = call_json("show", "--stats", "bad")
    assert set(found) == {"ref", "id", "tensors", "total"}
    assert found["ref"] == "bad/main/step00000002"
    w, z = found["tensors"]
    assert w == {
        "path": "m/w",
        "dtype": "float32",
        "shape": [100],
        "size_bytes": 400,
        "elements": 100,
        "min": 0.0,
        "max": 4.0,
        "mean": 7 / 97,
        "norm": 5.0,
        "nan": 1,
        "inf": 2,
        "zeros": 95,
        "zeros_share": 0.95,
    }
    assert (z["min"], z["max"], z["mean"]) == (None, None, [0.5, 2.5])
    assert found["total"] == {
        "tensors": 2,
        "size_bytes": 432,
        "elements": 102,
        "norm": pytest.approx(math.sqrt(25 + 14)),
        "nan": 1,
        "inf": 2,
        "zeros": 95,
        "zeros_share": 95 / 102,
        "nonfinite": ["m/w"],
    }


def test_diff_values(call: Call, broken: None) -> None:
    text = call("diff", "demo/main/step10", "demo", "--values").stdout
    norm = math.sqrt(600)
    relative = norm / math.hypot(*range(600))
    assert (
        f"~ model/w  2.3 KiB  norm {norm:.6g}, relative {relative:.6g}, max 1, 100% changed\n"
        in text
    )
    text = call("diff", "bad/main/step1", "bad", "--values").stdout
    assert "norm 5, relative inf, max 4, 5% changed, 3 NOT FINITE" in text
    assert "norm" not in call("diff", "bad/main/step1", "bad").stdout


def test_diff_values_json(call_json: CallJson, broken: None) -> None:
    (tensor,) = call_json("diff", "bad/main/step1", "bad", "--values")["tensors"]
    assert tensor["distance"] == {
        "norm": 5.0,
        "relative": "inf",
        "max": 4.0,
        "elements": 100,
        "changed": 5,
        "changed_share": 0.05,
        "nonfinite": 3,
    }
    found = call_json("diff", "demo", "bad", "--values")
    assert {tensor["distance"] for tensor in found["tensors"]} == {None}
    (tensor,) = call_json("diff", "bad/main/step1", "bad")["tensors"]
    assert set(tensor) == {"kind", "path", "before", "after"}


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0%"), (1, "100%"), (0.99999, "99.9%"), (0.5, "50%"), (1e-9, "1e-07%")],
)
def test_shares(part: float, text: str) -> None:
    assert share(part) == text
