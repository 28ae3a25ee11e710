"""Two programs of one brain: with Holdfast, and one that knows nothing but Thalia's files.

`native` trains a run. `foreign` finds no Holdfast and goes on from the newest file of a folder: its
first step becomes a full file, each later one a delta on the file before. Its reader and its writer
follow the facts of the format; like Thalia's own, they import classes by name and unpickle deltas,
so they are for files that one trusts.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
from dataclasses import is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import zstandard

from tests.systems.brain import STEPS, Brain, grow

ASIDE = ("config", "theta", "scheduler", "trial_state")
STATES = ("neuron_state", "learning_state", "oscillator_state", "neuromodulator_state")
HEADER = "<4sHHHHQQQQQQQQQQII"
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.float16)


def tensor_at(data: bytes, at: int) -> torch.Tensor:
    """Read a tensor, dense or as coordinates."""
    encoding, code, axes = struct.unpack_from("<III", data, at)
    shape = struct.unpack_from(f"<{axes}I", data, at + 12)
    dtype, at = DTYPES[code], at + 12 + 4 * axes
    found = torch.zeros(shape, dtype=dtype)
    if not encoding:
        if found.numel():
            found = torch.frombuffer(bytearray(data), dtype=dtype, count=found.numel(), offset=at)
        return found.reshape(shape).clone()
    (count,) = struct.unpack_from("<Q", data, at)
    if count:
        take = partial(torch.frombuffer, bytearray(data))
        where = take(dtype=torch.int64, count=axes * count, offset=at + 8).reshape(axes, count)
        found[tuple(where)] = take(dtype=dtype, count=count, offset=at + 8 + 8 * axes * count)
    return found


def value_of(data: bytes, value: Any) -> Any:
    """Return a value of a region's JSON."""
    if isinstance(value, list):
        return [value_of(data, item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("_type") == "tensor":
        return tensor_at(data, value["_offset"])
    if "_dataclass" in value:
        module, _, name = value["_dataclass"].rpartition(".")
        return getattr(import_module(module), name)(**value_of(data, value["_fields"]))
    return {key: value_of(data, item) for key, item in value.items()}


def read_delta(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a delta on top of its base."""
    file = io.BytesIO(data[64:])
    changes = pickle.load(file)
    metadata = json.loads(file.read()[4:])
    base = path.parent / metadata["delta_info"]["base_checkpoint"]
    assert data[9:41] == hashlib.sha256(base.read_bytes()).digest()
    state, _ = read(base)
    for name, change in changes["regions"].items():
        if change.get("type") == "new":
            state["regions"][name] = change["state"]
            continue
        region = state["regions"].setdefault(name, {"weights": {}})
        for key, weight in change["weights"].items():
            if weight["type"] == "full":
                region["weights"][key] = weight["tensor"]
            else:
                region["weights"][key][tuple(weight["indices"].T)] += weight["values"]
        region.update({key: change[key] for key in STATES if change[key] is not None})
    state |= {key: one for key, one in changes["metadata_changes"].items() if key in ASIDE}
    return {**state, "training_steps": changes["training_steps"]}, metadata


def unpacked(path: Path) -> bytes:
    """Return the bytes of a file; a compressed full one has its checksum behind the frame."""
    data = path.read_bytes()
    if path.suffix != ".zst":
        return data
    frame = zstandard.ZstdDecompressor().decompressobj()
    plain = frame.decompress(data)
    if frame.unused_data:
        assert hashlib.sha256(data[:-32]).digest() == frame.unused_data
        plain += hashlib.sha256(plain).digest()
    return plain


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file: the state, and all metadata."""
    data = unpacked(path)
    if data[:5] == b"\xce\x94THL":
        return read_delta(path, data)
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    header = struct.unpack_from(HEADER, data)
    metadata = json.loads(data[header[6] : header[6] + header[7]])
    state: dict[str, Any] = {"regions": {}, "pathways": {}}
    for at in range(header[8], header[8] + header[9], 48):
        name, offset, length = struct.unpack_from("<32sQQ", data, at)
        value = value_of(data, json.loads(data[offset : offset + length]))
        state["regions"][name.rstrip(b"\0").decode()] = value
    state |= {key: metadata[key] for key in (*ASIDE, "training_steps")}
    return state, metadata


def write(path: Path, state: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a full file, all tensors dense."""
    metadata = {**metadata, **{key: state[key] for key in (*ASIDE, "training_steps")}}
    text = json.dumps(metadata, indent=2).encode()
    data = bytearray(bytes(256) + text)

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            head = (0, DTYPES.index(value.dtype), value.ndim, *value.shape)
            whole = struct.pack(f"<{len(head)}I", *head) + value.numpy().tobytes()
            data.extend(whole)
            return {"_type": "tensor", "_offset": len(data) - len(whole), "_bytes": len(whole)}
        if is_dataclass(value):
            kind = type(value)
            return {
                "_dataclass": f"{kind.__module__}.{kind.__name__}",
                "_fields": plain(vars(value)),
            }
        return (
            {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
        )

    entries = []
    for name, region in state["regions"].items():
        part = json.dumps(plain(region), indent=2).encode()
        entries.append(struct.pack("<32sQQ", name.encode(), len(data), len(part)))
        data += part
    at = len(data), 48 * len(entries)
    counts = 0, 0, state["training_steps"], len(entries), 1
    struct.pack_into(HEADER, data, 0, b"THAL", 0, 1, 0, 0, 7, 256, len(text), *at, 0, 0, *counts)
    data += b"".join(entries)
    path.write_bytes(data + hashlib.sha256(data).digest())


def write_delta(path: Path, base: Path, state: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a delta: changed weights whole, and the rest of the state as changes of metadata."""
    old, _ = read(base)
    changes = {
        "regions": {
            name: {
                "weights": {
                    key: {"type": "full", "tensor": one, "shape": list(one.shape)}
                    for key, one in region["weights"].items()
                    if not torch.equal(one, old["regions"][name]["weights"][key])
                },
                **{key: region.get(key) for key in ("config", *STATES)},
            }
            for name, region in state["regions"].items()
        },
        "pathways": {},
        "metadata_changes": {key: state[key] for key in ASIDE},
        "training_steps": state["training_steps"],
    }
    digest = hashlib.sha256(base.read_bytes())
    steps = {"base_step": old["training_steps"], "current_step": state["training_steps"]}
    info = {"base_checkpoint": base.name, "base_hash": digest.hexdigest(), **steps}
    text = json.dumps({**metadata, "delta_info": info}).encode()
    head = struct.pack("<5sI32sQQ7x", b"\xce\x94THL", 1, digest.digest(), *steps.values())
    path.write_bytes(head + pickle.dumps(changes, 4) + struct.pack("<I", len(text)) + text)


def foreign(folder: Path, stage: str) -> None:
    """Train a stage, from the newest file of a folder on."""
    torch.set_num_threads(1)
    newest = (folder / "latest.thalia").resolve(strict=True)
    state, metadata = read(newest)
    brain = Brain()
    brain.load_full_state(state)
    brain.growth_history = metadata["growth_history"]
    grow(brain, stage)
    base = None
    for _ in range(STEPS):
        loss = brain.train()
        told = {
            "growth_history": brain.growth_history,
            "training_info": {"curriculum_stage": stage, "best_loss": loss},
            "current_stage": stage,
            "metrics": {"loss": loss, "neurons": brain.neurons},
        }
        path = folder / f"stage{brain.steps}{'.delta' if base else ''}.thalia"
        if base is None:
            write(path, brain.get_full_state(), told)
        else:
            write_delta(path, base, brain.get_full_state(), told)
        base = path


def native(url: str, *stages: str) -> None:
    """Train stages in a run."""
    import holdfast
    from tests.systems.mutants import make_named
    from tests.systems.thalia import resumed

    torch.set_num_threads(1)  # the order of sums must not depend on who else is on the machine
    make_named()
    for stage in stages:
        with holdfast.open(url) as reg:
            trainer = resumed(reg)
            grow(trainer.brain, stage)
            trainer.train_stage(stage)
