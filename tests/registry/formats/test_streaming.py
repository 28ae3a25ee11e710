"""A stored state is written in bounded memory, to the same file as the state in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import Damaged
from holdfast.registry.formats import content
from holdfast.registry.pytree import TensorBytes
from tests.support.faults import flip

MIB = 2**20
#: Pulls a state in every way that streams; prints by how many MiB the process grew each time.
_PROGRAM = """
import json, re, sys
from pathlib import Path
import holdfast
from holdfast.registry import formats

def mib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

url, folder, *names = sys.argv[1:]
grown = {}
with holdfast.open(url) as registry:
    for name in names:
        ref, _, file = name.partition("=")
        format = None if "." in file else file
        small, stored = (registry.checkpoint(f"run/{p}{ref}/latest") for p in ("small-", ""))
        formats.write(f"{folder}/small-{file}", small, format=format)
        Path("/proc/self/clear_refs").write_text("5")
        before = mib("VmRSS")
        formats.write(f"{folder}/{file}", stored, format=format)
        grown[file] = mib("VmHWM") - before
print(json.dumps(grown))
"""


def _state(mib: int) -> dict[str, dict[str, TensorBytes]]:
    """Return a large tensor of distinct chunks, and small ones around it."""
    tile = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    large = (np.arange(mib, dtype=np.uint8)[:, None] ^ tile).reshape(-1)
    small = {f"b{n}": np.full(n * 7 % 90, n, np.uint8) for n in range(40)}
    arrays = {"a": large[:MIB], "c": large, **small}
    return {
        "model": {
            name: TensorBytes("uint8", one.shape, memoryview(one)) for name, one in arrays.items()
        }
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    config = {"json": {"config.json": {"layers": 1}}}
    url = str(tmp_path / "registry")
    with holdfast.init(url, compression="none") as registry:
        for prefix, mib in (("", 144), ("small-", 1)):  # the chunks are stored once
            state = _state(mib)
            large = np.frombuffer(state["model"]["c"].data, np.uint8)
            for kind, one in {
                "tensors": state,
                "hf": {**state, **config},
                "arrays": {"arrays": {"x": large}},
                "file": {"file": {"name": "x", "bytes": large}},
            }.items():
                run = registry.run("run", create=True)
                run.save(one, step=run.manifest.count, phase=f"{prefix}{kind}")
            if mib > 1:
                data = large.tobytes()
    names = ["tensors=x.safetensors", "hf=hf", "arrays=x.npz", "file=x.bin"]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, url, tmp_path, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = json.loads(done.stdout)
    assert len(grown) == len(names)
    assert max(grown.values()) < 128, grown
    assert (tmp_path / "x.bin").read_bytes() == data
    assert np.load(tmp_path / "x.npz")["x"].tobytes() == data


def test_the_same_file_as_of_a_state_in_memory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_WINDOW_BYTES", 4 * MIB)  # chunks end within windows
    times = np.arange(9).view("datetime64[ns]").reshape(3, 3)
    states = {
        "x.safetensors": _state(30),
        "x.npz": {"arrays": {"t": times, "z": np.zeros(0), "f": np.arange(10**6).reshape(10, -1)}},
        "x.andrea": {"step": 7, **{name: {"w": np.arange(3e6, dtype="float32")} for name in "mv"}},
    }
    states["x.andrea"]["weights"] = states["x.andrea"]["m"]
    for step, (name, state) in enumerate(states.items()):
        saved = run.save(state, step=step)
        chosen = "andrea" if name == "x.andrea" else None
        formats.write(tmp_path / name, saved, format=chosen)
        formats.write(tmp_path / f"memory-{name}", state, format=chosen)
        assert (tmp_path / name).read_bytes() == (tmp_path / f"memory-{name}").read_bytes(), name


def test_a_damaged_chunk_at_the_end_leaves_no_file(run: Run, tmp_path: Path) -> None:
    saved = run.save(_state(60), step=1)
    last = saved.handle.reader.placement.packs[-1]
    flip(run.handle.store.backend, str(last.key), 8 * (last.size_bytes // 2))
    with pytest.raises(Damaged, match="damaged"):
        formats.write(tmp_path / "x.safetensors", saved)
    assert [one.name for one in tmp_path.iterdir()] == ["registry"]
