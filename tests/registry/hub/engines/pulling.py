"""An engine that pulls: `/pull_weights` by the rules that SGLang's source has (sglang#30367).

It is written from these rules, without their code: from the newest whole version at or below the
target, or from what is there, every delta in turn; a checksum of each tensor that changed.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

_INDEX, _DONE = "model.safetensors.index.json", ".weight_sync/state.json"


def pull(
    local: Path, source: Path, target: int, each: Callable[[str], object] = lambda name: None
) -> None:
    """Bring a checkpoint to a version; `each` is called before a tensor is changed."""
    done = local / _DONE
    done.parent.mkdir(parents=True, exist_ok=True)
    applied = int(json.loads(done.read_text())["version"]) if done.exists() else None
    start = target
    while start > (applied or 0) and "delta_encoding" in metadata(_folder(source, start)):
        start -= 1
    if applied is None or start > applied:
        for path in local.iterdir():
            if path.is_file():
                path.unlink()
        for path in _folder(source, start).iterdir():
            if path.is_file():
                shutil.copy2(path, local)
        applied = start
        done.write_text(json.dumps({"version": f"{start:06d}"}))
    for number in range(applied + 1, target + 1):
        _apply(local, _folder(source, number), number, each)
        done.write_text(json.dumps({"version": f"{number:06d}"}))


def _folder(source: Path, number: int) -> Path:
    found = source / f"weight_v{number:06d}"
    if not found.is_dir():
        raise FileNotFoundError(found)
    return found


def metadata(folder: Path) -> dict[str, str]:
    """Return what the index of a folder says: the encoding of a delta."""
    index = folder / _INDEX
    found: dict[str, str] = json.loads(index.read_text())["metadata"] if index.exists() else {}
    return found


def _tensors(data: bytes) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Return the metadata of a file, and where each tensor begins and ends in it."""
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    offsets = {name: one["data_offsets"] for name, one in header.items()}
    return metadata, {name: (8 + size + b, 8 + size + e) for name, (b, e) in offsets.items()}


def _apply(local: Path, folder: Path, number: int, each: Callable[[str], object]) -> None:
    about = metadata(folder)
    assert (int(about["version"]), int(about["base_version"])) == (number, number - 1)
    assert (about["compression_format"], about["checksum_format"]) == ("zstd", "adler32")
    assert about["delta_encoding"] == "overwrite"
    places = {
        name: (path, *place)
        for path in local.glob("*.safetensors")
        for name, place in _tensors(path.read_bytes())[1].items()
    }
    for file in sorted(folder.glob("*.safetensors")):
        delta = file.read_bytes()
        checksums, changed = _tensors(delta)
        for name, (begin, end) in changed.items():
            each(name)
            raw = zstandard.ZstdDecompressor().decompress(delta[begin:end])
            count = int.from_bytes(raw[:4], "little")
            path, begin, end = places[name]
            data = np.fromfile(path, np.uint8)
            data[begin:end][np.frombuffer(raw[4 : 4 + 4 * count], "<u4")] = np.frombuffer(
                raw[4 + 4 * count :], np.uint8
            )
            data.tofile(path)
            assert f"{zlib.adler32(data[begin:end].tobytes()):08x}" == checksums[name], name
