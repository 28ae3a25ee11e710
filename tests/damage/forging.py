"""A registry taken apart into records, changed in one place, and sealed again.

Whoever can write to a store can compute digests. So a forged record is renamed, and every record
that names it follows, up to the last slot and the snapshot: no hash gives the forgery away.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Storing
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.objects.framing import join_lines, unwrap_frame, wrap_frame
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.spec import Draw, Phase, Pool, RunSpec, Stream
from holdfast.registry.spec.policies import Monitor
from holdfast.registry.values.digest import Digest
from tests.support.stores import contents, new_backend, opened

#: The run that is forged, the one that was forked from it, and one that has nothing to do with it.
FORGED, FORK, CALM = "night", "fork", "calm"

_HEX = re.compile(rb"[0-9a-f]{64}")

Path = tuple[Any, ...]


@dataclass
class Records:
    """The records of a registry as JSON.

    Attributes:
        config: `registry.json`.
        slots: Lines of the slots, by key, forks behind what they were forked from.
        snapshots: Both lines of each snapshot, by key.
        manifests: Bodies by key.
        placements: Headers by key.
        epochs: Lines by key.
        rest: Everything else: packs, and the columns of placements.
    """

    config: Any
    slots: dict[str, list[Any]]
    snapshots: dict[str, list[Any]]
    manifests: dict[str, Any]
    placements: dict[str, Any]
    epochs: dict[str, list[Any]]
    rest: dict[str, bytes]

    def parts(self) -> dict[str, Any]:
        """Return what can be forged, by name; a snapshot is said to be one."""
        return {
            "config": self.config,
            "slots": self.slots,
            "snapshots": self.snapshots,
            "manifests": self.manifests,
            "placements": self.placements,
            "epochs": self.epochs,
        }


@cache
def healthy() -> dict[str, bytes]:
    """Return the files of a registry with something of everything that a run can hold."""
    store = new_backend()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(
            "holdfast.registry.history.creating.describe_environment", lambda: {"host": "node"}
        )
        patch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 4)
        with opened(store) as registry:
            calm = registry.create_run(CALM, seed=1)
            calm.save({"model": {"w": np.arange(30, dtype=np.float32)}}, step=1)
            _live(registry)
        orphan = ObjectKey("packs", Digest.of(b"collected long ago"), 0)
        store.put_if_absent(epoch_key(1), encode_sweep(1, [orphan]))
    return contents(store)


def _live(registry: Any) -> None:
    spec = RunSpec(
        name="forged",
        phases=(Phase(name="main", monitors=(Monitor(metric="loss", mode="min"),)),),
        commit_keys=("time",),
        pool=Pool(
            phase="main", size=3, draws=(Draw(kind="self", weight=1), Draw(kind="roster", weight=1))
        ),
        streams=(Stream(name="rows", lifetime="resettable"),),
        inference=("model",),
    )
    run = registry.create_run(FORGED, seed=2, preset=spec, config={"lr": 0.1, "layers": [1, 2]})
    for step in (1, 2, 3):
        rows = [{"step": step, "x": 0.5, "kind": "a"}, {"step": step, "x": 1.5, "kind": "b"}]
        run.save(
            _state(step),
            step=step,
            metrics={"loss": 1.0 / step},
            meta={"note": "hi", "big": 2**70},
            companions={"mean": {"w": np.arange(40, dtype=np.float32) + step}},
            streams={"rows": rows},
            storing=Storing(precision={"model/half": "bf16", "*": "keep"} if step > 1 else None),
        )
    run.pins.gates.set("good", run.history.checkpoint(1))
    run.pins.tags.set("keeper", run.latest())
    run.pins.artifacts.set("bank", {"rows": np.arange(50, dtype=np.int64)})
    run.releases.publish("1.0.0", run.latest(), only=["model"], card={"description": "a card"})
    run.pool.promote(run.latest())
    run.pool.promote(run.history.checkpoint(1), frozen=True)
    run.pool.record_match([None, 1], [1, 0], match="game-1")
    run.latest().report({"accuracy": 0.5})
    for _ in run.follow.checkpoints(group="eval", follow=False):
        break
    registry.fork(f"{FORGED}/gates/good", FORK)
    run.refresh()
    run.streams["rows"].archive("first")
    run.status = "interrupted"


def _state(step: int) -> dict[str, Any]:
    fresh = np.random.default_rng(step)
    return {
        "model": {
            "w": torch.from_numpy(fresh.standard_normal((8, 12)).astype(np.float32)),
            "half": torch.from_numpy(fresh.standard_normal((6, 10)).astype(np.float32)),
            "bias": torch.full((4,), float(step)),
            "empty": torch.empty((0, 3)),
            "sparse": torch.eye(5).to_sparse(),
        },
        "data": {
            "rows": fresh.standard_normal(40),
            "days": np.array(["2026-01-01"] * 12, "datetime64[D]"),
            "text": "long " * 20_000,
            "raw": bytes(5000),
            "scalar": np.float32(1.5),
            "set": {1, 2},
            "pair": (1, 2.5),
            "big": 2**70,
        },
        "bare": np.arange(20, dtype=np.int16),
        "time": 1000.5 * step,
    }


# Taking apart and sealing


def taken_apart(files: dict[str, bytes]) -> Records:
    """Return the records of a registry."""
    found = Records(None, {}, {}, {}, {}, {}, {})
    order = [CALM, FORGED, FORK]
    keys = sorted(files, key=lambda key: (order.index(_run(key)), key) if _run(key) else (-1, key))
    for key in keys:
        data = files[key]
        if key == "registry.json":
            found.config = _lines(data)[0]
        elif "/log/" in key:
            found.slots[key] = _lines(data)
        elif "/snapshots/" in key:
            found.snapshots[key] = _lines(data)
        elif key.startswith("epochs/"):
            found.epochs[key] = _lines(data)
        elif key.startswith("manifests/"):
            found.manifests[key] = json.loads(unwrap_frame(data, where=key))
        elif key.startswith("placements/"):
            header, _, columns = unwrap_frame(data, where=key).partition(b"\n")
            found.placements[key] = json.loads(header)
            found.rest[key] = columns
        else:
            found.rest[key] = data
    return found


def sealed(records: Records) -> dict[str, bytes]:
    """Return the files of these records: every name and link fits what is in them now."""
    names: dict[bytes, bytes] = {}
    files = {key: data for key, data in records.rest.items() if not key.startswith("placements/")}
    files["registry.json"] = join_lines([spelled(records.config)])
    for key, body in records.manifests.items():
        names[_named(key)] = _id(body)
        _put_frame(files, key, _id(body), spelled(body))
    for key, header in records.placements.items():
        content = _renamed(spelled(header), names) + b"\n" + records.rest[key]
        names[_named(key)] = hashlib.sha256(content).hexdigest().encode()
        _put_frame(files, key, names[_named(key)], content)
    original = healthy()
    for key, lines in records.slots.items():
        before = original[key][:-66].split(b"\n")
        sealed_lines = []
        for number, line in enumerate(lines):
            text = _renamed(spelled(line), names)
            sealed_lines.append(text)
            if number < len(before):
                names[_digest(before[number])] = _digest(text)
        files[key] = join_lines(sealed_lines)
        names[_digest(original[key])] = _digest(files[key])
    for key, lines in (*records.snapshots.items(), *records.epochs.items()):
        files[key] = join_lines([_renamed(spelled(line), names) for line in lines])
    return files


def spelled(value: Any) -> bytes:
    """Return canonical JSON, of what no canonical JSON can be as well."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _id(body: Any) -> bytes:
    """Return the id that a manifest of this body has; of one that has none, some other name."""
    try:
        parts = [[name, _digest(spelled(part)).decode()] for name, part in body["components"]]
        body = {"components": parts, "format": body["format"], "kind": body["kind"]}
    except (KeyError, TypeError, ValueError):
        pass
    return _digest(spelled(body))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _renamed(data: bytes, names: dict[bytes, bytes]) -> bytes:
    return _HEX.sub(lambda found: names.get(found[0], found[0]), data)


def _named(key: str) -> bytes:
    return key.split("/")[2].split(".")[0].encode()


def _put_frame(files: dict[str, bytes], key: str, name: bytes, content: bytes) -> None:
    kind, generation = key.split("/")[0], key.rpartition(".")[2]
    text = name.decode()
    files[f"{kind}/{text[:2]}/{text}.{generation}"] = wrap_frame(content)


def _run(key: str) -> str:
    return key.split("/")[1] if key.startswith("runs/") else ""


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data[:-66].split(b"\n")]


# Changing


@dataclass(frozen=True)
class Place:
    """A field of a record.

    Attributes:
        path: Steps from the records to it.
        name: Its name; the first of several alike represents them.
        value: What is there.
    """

    path: Path
    name: str
    value: Any


def places() -> list[Place]:
    """Return a field of each kind, the innermost ones as well as those that hold others."""
    records = taken_apart(healthy())
    found: dict[str, Place] = {}
    for part, value in records.parts().items():
        for path, inner in _walk((part,), value):
            if FORK in path or CALM in path or len(path) < 2:
                continue
            found.setdefault(_shape(records, path), Place(path, _shape(records, path), inner))
    return [place for place in found.values() if place.name]


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), inner
            yield from _walk((*path, key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield (*path, number), inner
            yield from _walk((*path, number), inner)


def _shape(records: Records, path: Path) -> str:
    """Name a field so that those of equal rules have equal names; empty for what is none."""
    steps = [path[0]]
    value: Any = records.parts()[path[0]]
    skip = 1 if path[0] != "config" else 0
    if skip and (len(path) < 3 or f"runs/{CALM}/" in path[1] or f"runs/{FORK}/" in path[1]):
        return ""
    for number, step in enumerate(path[1:]):
        if number < skip:
            pass
        elif isinstance(step, str):
            steps.append(step)
        elif isinstance(value[step], dict) and ("action" in value[step] or "kind" in value[step]):
            steps.append(str(value[step].get("action", value[step].get("kind"))))
        else:
            steps.append("*" if "skeleton" not in steps else "-")
        value = value[step]
    return "/".join(steps)


def forged(place: Place, value: Any) -> dict[str, bytes]:
    """Return the files of the registry with one field changed; `...` takes it away."""
    records = taken_apart(healthy())
    holder: Any = records.parts()
    for step in place.path[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[place.path[-1]]
    else:
        holder[place.path[-1]] = copy.deepcopy(value)
    return sealed(records)


def newest_checkpoint(records: Records) -> dict[str, Any]:
    """Return the components of the newest checkpoint of the run that is forged, by name."""
    ids = [
        action["manifest"]
        for key, lines in records.slots.items()
        if _run(key) == FORGED
        for line in lines
        for action in line.get("actions", ())
        if action["action"] == "checkpoint.add"
    ]
    (body,) = [body for key, body in records.manifests.items() if ids[-1] in key]
    return dict(body["components"])


def without_snapshots(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a registry whose runs are opened by their logs alone."""
    return {key: data for key, data in files.items() if "/snapshots/" not in key}
