"""Files of NumPy, against NumPy itself."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from tests.support.states import same

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layer/b": np.array(2.5),
    "empty": np.empty((0, 7), np.int16),
    "mask": np.array([True, False]),
    "when": np.array(["2026-01-02"], dtype="datetime64[ns]"),
    "z": np.array([1 + 2j]),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_round_trip(save: Any, run: Run, tmp_path: Path) -> None:
    save(tmp_path / "in.npz", **ARRAYS)
    found = formats.read(tmp_path / "in.npz")
    assert (found.format, found.metadata) == ("npz", None)
    assert same(found.state, {"arrays": ARRAYS})
    for name in ("a.npz", "b.npz"):
        formats.write(tmp_path / name, run.exchange.push(found.state, step=1))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as back:
        assert same(dict(back), ARRAYS)


@pytest.mark.parametrize(
    ("head", "data"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904), }", b""),
        (b"{'descr': ('<f4', (2,)), 'fortran_order': True, 'shape': (3,), }", bytes(24)),
    ],
    ids=["an empty array that no library makes", "elements that are arrays"],
)
def test_what_numpy_cannot_read_is_refused(head: bytes, data: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        begin = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
        archive.writestr("w.npy", begin + data)
    with (
        pytest.raises(ValueError, match=r"too big|[Ff]ailed to read"),
        np.load(tmp_path / "x.npz") as found,
    ):
        found["w"]
    for read in (formats.read, lambda path: formats.digest(path, None, None)):
        with pytest.raises(InvalidInput, match="not a sound NumPy file"):
            read(tmp_path / "x.npz")
    assert len(formats.validate(tmp_path / "x.npz")) == 1


def test_other_orders_become_ours(tmp_path: Path) -> None:
    data = np.arange(24.0).reshape(2, 3, 4)
    np.savez(tmp_path / "x.npz", f=np.asfortranarray(data), b=data.astype(">f8"))
    state = formats.read(tmp_path / "x.npz").state["arrays"]
    assert same(
        {name: np.ascontiguousarray(one) for name, one in state.items()},
        {
            "f": data,
            "b": data,
        },
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.ones(2, dtype=torch.bfloat16)}, "no element type for bfloat16"),
        ({"a\0b": torch.ones(2)}, "cannot be a file name"),
        ({"inner": {"w": torch.ones(2)}}, "model/inner"),
    ],
)
def test_what_does_not_fit_is_refused(
    tensors: dict[str, Any], message: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleState, match=message):
        formats.write(tmp_path / "x.npz", run.exchange.push({"model": tensors}, step=1))
    assert not (tmp_path / "x.npz").exists()


def test_neither_push_nor_pull_imports_torch(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(40_000.0)}}
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        opened.create_run("run").exchange.push(state, step=1)
    np.savez(tmp_path / "in.npz", w=np.arange(40_000.0))
    program = """
import sys
sys.modules["torch"] = None
from holdfast.registry.cli import main
main()
"""
    for words in (
        ["push", "in.npz", "run", "--step", "2"],
        ["pull", "run/main/step1", "--to", "o.npz"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *words, "-r", "registry"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "o.npz") as back:
        assert back["w"].tolist() == list(range(40_000))
