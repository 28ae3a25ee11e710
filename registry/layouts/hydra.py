"""Hydra: phases, gates, the opponent pool, GRP and evaluations.

The names are those of the preset `hydra`; every state has a `.sha256` file. Every run numbers the
entries of its own pool, so an imported pool does not become one: each model with its metadata
becomes an artifact, named like its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry import formats
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.history import format_time
from holdfast.registry.layouts import torch_files
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.patterns import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile, TextFile
from holdfast.registry.loading import Stored
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.presets import load_preset

NAME: Final = "hydra"
SIDECARS: Final = True
COMPANIONS: Final = True
#: The folder of evaluations, and the names of the artifacts and streams in it.
_FOLDER: Final = "eval"
_EVAL: Final = f"{_FOLDER}."
#: The component of an imported model of the pool that holds its `.meta.json`.
_META: Final = "meta"
_POOL: Final = "pool_v"


def spec() -> RunSpec:
    """Return the preset."""
    return load_preset(NAME)


is_complete = torch_files.is_complete


# Out of a run


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield the checkpoints of each phase, gates, pool, artifacts and streams."""
    names = {**spec().layout, **run.run.spec.layout}
    paths = {}
    for one in run.checkpoints:
        if fields_of(names["gate"], imported_as(one, NAME).get("file", "")):
            continue  # the imported folder had only the gate
        fields = {"phase": one.handle.record.phase, "step": one.step}
        paths[one.handle.n] = written(names["checkpoint"], fields)
        yield _file(paths[one.handle.n], one)
        for name, companion in one.companions.items():
            yield _file(written(names["companion"], {**fields, "name": name}), companion)
    for phase in run.phases:
        for link, target in (("latest", run.latest(phase)), ("best", run.best(phase))):
            if target is not None and target.handle.n in paths:
                path = written(names[link], {"phase": phase, "step": target.step})
                yield Link(path, Path(paths[target.handle.n]).name)
    for name, gate in run.gates.items():
        yield _file(written(names["gate"], {"name": name}), gate)
    for entry in run.pool:
        fields = {"version": entry.version, "step": entry.step}
        yield _file(written(names["pool"], fields), entry)
        yield TextFile(written(names["pool_meta"], fields), _json(_metadata(entry)))
    for name, artifact in run.artifacts.items():
        yield from _artifact(names, name, artifact)
    for name, stream in run.streams.items():
        text = "".join(f"{json.dumps(entry)}\n" for entry in stream.read())
        yield TextFile(_placed(names["stream"], name), text.encode())


def _placed(pattern: str, name: str) -> str:
    """Return the path of an artifact or a stream; those of evaluations have a folder."""
    if _is_evaluation(name):
        return f"{_FOLDER}/{name}{Path(pattern).suffix}"
    return written(pattern, {"name": name})


def _is_evaluation(name: str) -> bool:
    return name == _FOLDER or name.startswith((_EVAL, f"{_FOLDER}_"))


def _file(path: str, stored: Stored) -> StateFile:
    record = getattr(stored, "n", "")  # keys of the commit are part of the file
    return StateFile(path, stored, "torch", f"{record}:{stored.digest}", sidecar=True)


def _artifact(names: Mapping[str, str], name: str, stored: Stored) -> Iterator[Entry]:
    opaque = formats.opaque_name(stored)
    if opaque is not None:
        folder = _FOLDER if name.startswith(_EVAL) else name
        yield StateFile(f"{folder}/{opaque}", stored, "opaque", str(stored.digest), sidecar=True)
        return
    if not name.startswith(_POOL):
        yield _file(_placed(names["artifact"], name), stored)
        return
    path = f"{Path(names['pool']).parent}/{name}.pt"
    only = tuple(part for part in stored.components if part != _META)
    yield StateFile(path, stored, "torch", str(stored.digest), only, sidecar=True)
    if _META in stored.components:
        text = _json(stored.load(only=_META)[_META])
        yield TextFile(f"{Path(names['pool_meta']).parent}/{name}.meta.json", text)


def _metadata(entry: PoolEntry) -> dict[str, Any]:
    """Return the sidecar of a pool model; the document gives its content, but no keys."""
    return {
        "version": entry.version,
        "global_step": entry.step,
        "phase": entry.phase,
        "mu": entry.mu,
        "sigma": entry.sigma,
        "games_played": entry.games,
        "win_rate": entry.win_rate,
        "promoted_at": format_time(entry.record.time_ms),
    }


def _json(value: Any) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


# Into a run


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield checkpoints by phase and step, gates after their phase's checkpoints, then others."""
    names = spec().layout
    plain = sorted(path for path, target in files.items() if target is None)
    checkpoints: dict[tuple[str, int], str] = {}
    companions: dict[tuple[str, int], dict[str, str]] = {}
    others = []
    for path in plain:
        if fields := fields_of(names["checkpoint"], path):
            checkpoints[fields["phase"], fields["step"]] = path
        elif fields := fields_of(names["companion"], path):
            key = fields["phase"], fields["step"]
            companions.setdefault(key, {})[fields["name"]] = path
        else:
            others += _other(path, names, files)
    gates = {gate.name: gate.phase for gate in spec().gates}
    for (phase, step), path in sorted(checkpoints.items()):
        beside = companions.get((phase, step), {})
        yield Found(path, "checkpoint", "torch", "", phase, step, companions=beside)
    for one in others:
        phase_of = gates.get(one.name) if one.kind == "gate" else None
        yield Found(one.path, one.kind, one.format, one.name, phase_of, beside=one.beside)


def _other(path: str, names: Mapping[str, str], files: Mapping[str, str | None]) -> list[Found]:
    file = Path(path)
    if fields := fields_of(names["gate"], path):
        return [Found(path, "gate", "torch", fields["name"])]
    if fields := fields_of(names["pool"], path):
        meta = f"{path.removesuffix('.pt')}.meta.json"
        beside = meta if meta in files else None
        return [Found(path, "artifact", "torch", file.stem, beside=beside)]
    if file.parent == Path(_FOLDER) and _is_evaluation(file.stem):
        if file.suffix == ".pt":
            return [Found(path, "artifact", "torch", file.stem)]
        if file.suffix == ".jsonl":
            return [Found(path, "stream", "jsonl", file.stem)]
    if fields := fields_of(names["artifact"], path):
        return [Found(path, "artifact", "torch", fields["name"])]
    if fields := fields_of(names["stream"], path):
        return [Found(path, "stream", "jsonl", fields["name"])]
    if file.parent == Path(_FOLDER) and file.suffix != ".sha256":
        return [Found(path, "artifact", "opaque", f"{_EVAL}{file.name}")]
    return []


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:  # noqa: ARG001
    """Read the file of a checkpoint or a gate; a gate's phase and step come from its content."""
    read = torch_files.reading(found, path, "global_step")
    phase = read.state.get("phase")
    held = str(phase) if type(phase) in (int, str) else None
    if found.kind == "gate":
        return Reading(read.state, read.step, read.warnings, found.phase or held)
    warnings = read.warnings
    if held is not None and held != found.phase:
        warnings += (f"its name says phase {found.phase}, its state {held}; the name counts",)
    return Reading(read.state, read.step, warnings)
