"""`inspect` and `validate`: files that need no registry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.registry.formats import table
from tests.registry.cli.calling import Call, CallJson


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save({"model": {"w": torch.ones(3, 4)}, "step": 1}, tmp_path / "model.bin")
    return tmp_path / "model.bin"


def test_a_file_is_described_by_its_content(file: Path, call: Call, call_json: CallJson) -> None:
    found = call_json("inspect", file)
    assert found == {
        "format": "torch",
        "size_bytes": file.stat().st_size,
        "metadata": None,
        "tensors": [{"path": "model/w", "dtype": "float32", "shape": [3, 4]}],
    }
    assert call("inspect", file).output.splitlines()[0] == "format  torch"
    assert call_json("inspect", file, "--format", "opaque")["format"] == "opaque"


def test_problems_are_listed_and_end_with_a_status(
    file: Path, call: Call, call_json: CallJson, tmp_path: Path
) -> None:
    assert call_json("validate", file) == {"ok": True, "problems": []}
    assert call("validate", file).output == "ok\n"
    np.savez(tmp_path / "x.npz", a=np.array([None]), b=np.ones(3), c=np.array(["x"]))
    done = call("validate", tmp_path / "x.npz", status=3)
    assert [line.split(": ")[1] for line in done.output.splitlines()] == ["a.npy", "c.npy"]


def test_the_help_names_every_format(call: Call) -> None:
    text = " ".join(call("push", "--help").output.split())
    assert all(one in text for one in table.EXTENSIONS.split(", "))
    text = " ".join(call("pull", "--help").output.split())
    assert all(one.extensions[0] in text for one in table.FORMATS if one.extensions)
