"""Hydra: phases, gates, the opponent pool, GRP and evaluations.

The names are those of the preset `hydra`; every state has a `.sha256` file. Files of states are of
`torch.save` (`.pt`), or records of Burn (`.mpk`): those of a run that was imported from records, or
whose layout has `records = "mpk"`. A record's item is the state, and the rest of it is noted in the
meta of its checkpoint. Models of the pool keep their versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.registry import formats
from holdfast.registry.curation.pool import DEFAULT, ForeignEntry, PoolEntry, Rating
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import check_phase, check_step, format_time
from holdfast.registry.layouts.contents import RunContents, import_notes, imported_as
from holdfast.registry.layouts.scanning import counted, ends_like_torch, fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile, TextFile
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.spec.presets import load_preset

NAME: Final = "hydra"
SIDECARS: Final = True
COMPANIONS: Final = True
STEPPED: Final = False
#: The folder of evaluations, and the names of the artifacts and streams in it.
_FOLDER: Final = "eval"
_EVAL: Final = f"{_FOLDER}."
#: Numbers of a log are below this one.
_MOST: Final = 2**53
#: The ending of the names of states in the layout, and those that the recorders of Burn give.
_TORCH: Final = ".pt"
_RECORD: Final = ".mpk"
_RECORDS: Final = (_RECORD, ".mpk.gz", ".bin", ".bin.gz")
#: What a record has besides its item, if no record was imported. Burn reads it only to explain an
#: error.
_METADATA: Final = {
    "float": "f32",
    "int": "i32",
    "format": "burn_core::record::file::NamedMpkFileRecorder"
    "<burn_core::record::settings::FullPrecisionSettings>",
    "version": "0.16.0",
    "settings": "FullPrecisionSettings",
}


is_complete = ends_like_torch


# Out of a run


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield the checkpoints of each phase, gates, pool, artifacts and streams."""
    names = {**load_preset(NAME).layout, **run.run.spec.layout}
    files = _Files(run, names)
    paths = {}
    for one in run.checkpoints:
        if fields_of(names["gate"], _as_torch(imported_as(one, NAME).get("file", ""))):
            continue  # the imported folder had only the gate
        fields = {"phase": one.handle.record.phase, "step": one.step}
        main = files.of("checkpoint", fields, one)
        paths[one.handle.n] = main.path
        yield main
        for name, companion in one.companions.items():
            yield files.of("companion", {**fields, "name": name}, companion, like=main)
    for phase in run.phases:
        for link, target in (("latest", run.latest(phase)), ("best", run.best(phase))):
            if target is not None and target.handle.n in paths:
                file = Path(paths[target.handle.n])
                path = written(names[link], {"phase": phase, "step": target.step})
                yield Link(f"{path.removesuffix(_TORCH)}{_ending(file.name)}", file.name)
    for name, gate in run.gates.items():
        yield files.of("gate", {"name": name}, gate)
    for entry in run.pool:
        fields = {"version": entry.version, "step": entry.step}
        yield files.of("pool", fields, entry)
        text = json.dumps(_metadata(entry), indent=2)
        yield TextFile(written(names["pool_meta"], fields), f"{text}\n".encode())
    artifacts = [_artifact(names, name, one) for name, one in run.artifacts.items()]
    yield from {one.path: one for one in artifacts}.values()  # the newest of a file that grows
    for name, stream in run.streams.items():
        text = "".join(f"{json.dumps(entry)}\n" for entry in stream.read())
        yield TextFile(_placed(names["stream"], name), text.encode())


class _Files:
    """The files of states: of torch, or records of Burn."""

    def __init__(self, run: RunContents, names: Mapping[str, str]) -> None:
        self._names = names
        noted = [one for one in run.checkpoints if _noted_record(one)]
        #: What new records have besides their item, and how their names end.
        self._record = _noted_record(noted[-1]) if noted else None
        self._ending = _ending(imported_as(noted[-1], NAME).get("file", "")) if noted else _RECORD
        if names.get("records") == "mpk" and not noted:
            self._record = {"metadata": _METADATA}

    def of(
        self, kind: str, fields: Mapping[str, Any], stored: Stored, like: StateFile | None = None
    ) -> StateFile:
        """Return the file of a state; a companion is of the same format as its checkpoint."""
        record, ending = _noted_record(stored), self._ending
        noted = imported_as(stored, NAME) if isinstance(stored, Checkpoint) else {}
        if record is not None:
            ending = _ending(noted.get("file", ""))
        elif not noted:
            record = self._record
        if like is not None:
            record, ending = (
                (None, ending) if like.format == "torch" else (record, _ending(like.path))
            )
        return _file(written(self._names[kind], fields), stored, record, ending)


def _noted_record(stored: Stored) -> Mapping[str, Any] | None:
    """Return the rest of the record of an imported checkpoint, without its item."""
    noted = import_notes(stored.handle.record, NAME) if isinstance(stored, Checkpoint) else {}
    found = noted.get("record")
    return found if isinstance(found, dict) else None


def _ending(name: str) -> str:
    """Return the ending of the name of a state."""
    return next((one for one in (_RECORD, f"{_RECORD}.gz") if name.endswith(one)), _TORCH)


def _file(
    path: str, stored: Stored, record: Mapping[str, Any] | None = None, ending: str = _RECORD
) -> StateFile:
    # Keys of the commit are part of the file.
    n = stored.handle.n if isinstance(stored, Checkpoint) else ""
    key = f"{n}:{stored.digest}"
    as_record = f"{path.removesuffix(_TORCH)}{ending}"
    if {"metadata", "item"} <= {*stored.components}:
        return StateFile(as_record, stored, "burn", key, sidecar=True)
    if record is None:
        return StateFile(path, stored, "torch", key, sidecar=True)
    state = partial(_recorded, stored, record)
    return StateFile(as_record, stored, "burn", key, state=state, sidecar=True)


def _recorded(stored: Stored, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a state, with its keys in their order."""
    content = formats.StoredContent(stored, None)
    state = formats.portable(content)
    return {**record, "item": {name: state[name] for name, _ in content.skeletons}}


def _placed(pattern: str, name: str) -> str:
    """Return the path of an artifact or a stream; those of evaluations have a folder."""
    if _is_evaluation(name):
        return f"{_FOLDER}/{name}{Path(pattern).suffix}"
    return written(pattern, {"name": name})


def _is_evaluation(name: str) -> bool:
    return name == _FOLDER or name.startswith((_EVAL, f"{_FOLDER}_"))


def _artifact(names: Mapping[str, str], name: str, stored: Stored) -> StateFile:
    opaque = formats.opaque_name(stored)
    if opaque is None:
        return _file(_placed(names["artifact"], name), stored)
    folder = _FOLDER if name.startswith(_EVAL) else name
    return StateFile(f"{folder}/{opaque}", stored, "opaque", str(stored.digest), sidecar=True)


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


# Into a run


def _as_torch(path: str) -> str:
    """Return the name that a file has in the layout; the recorders of Burn give other endings."""
    for ending in _RECORDS:
        if path.endswith(ending):
            return f"{path.removesuffix(ending)}{_TORCH}"
    return path


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield checkpoints by phase and step, gates after their phase's checkpoints, then others."""
    names = load_preset(NAME).layout
    plain = sorted(path for path, target in files.items() if target is None)
    checkpoints: dict[tuple[str, int], str] = {}
    companions: dict[tuple[str, int], dict[str, str]] = {}
    models, others = [], []
    for path in plain:
        name = _as_torch(path)
        if fields := fields_of(names["checkpoint"], name):
            checkpoints[fields["phase"], fields["step"]] = path
        elif fields := fields_of(names["companion"], name):
            key = fields["phase"], fields["step"]
            companions.setdefault(key, {})[fields["name"]] = path
        elif fields := fields_of(names["pool"], name):
            models.append((fields["version"], fields["step"], path))
        else:
            others += _other(path, name, names)
    gates = {gate.name: gate.phase for gate in load_preset(NAME).gates}
    for (phase, step), path in sorted(checkpoints.items()):
        beside = companions.get((phase, step), {})
        yield Found(path, "checkpoint", "", "", phase, step, companions=beside)
    for one in others:
        phase_of = gates.get(one.name) if one.kind == "gate" else None
        yield replace(one, phase=phase_of)
    for version, step, path in sorted(models):
        meta = f"{_as_torch(path).removesuffix(_TORCH)}.meta.json"
        yield Found(
            path, "pool", "", str(version), step=step, beside=meta if meta in files else None
        )


def _other(path: str, name: str, names: Mapping[str, str]) -> list[Found]:
    file = Path(path)
    if fields := fields_of(names["gate"], name):
        return [Found(path, "gate", "", fields["name"])]
    if file.parent == Path(_FOLDER) and _is_evaluation(file.stem):
        if file.suffix == ".pt":
            return [Found(path, "artifact", "torch", file.stem)]
        if file.suffix == ".jsonl":
            return [Found(path, "stream", "jsonl", file.stem)]
    if fields := fields_of(names["artifact"], name):
        return [Found(path, "artifact", "", fields["name"])]
    if fields := fields_of(names["stream"], path):
        return [Found(path, "stream", "jsonl", fields["name"])]
    if file.parent == Path(_FOLDER) and file.suffix != ".sha256":
        return [Found(path, "artifact", "opaque", f"{_EVAL}{file.name}", grows=True)]
    return []


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:
    """Read a file of a state; a gate's phase and step come from its content."""
    state, noted = _state(path)
    step, warnings = counted(found, state, "global_step")
    if found.kind == "pool":
        entry, warnings = _entry(found, options.get("about"))
        return Reading(state, step, warnings, entry=entry)
    phase = state.get("phase")
    held = str(phase) if type(phase) in (int, str) else None
    if found.kind == "gate":
        return Reading(state, step, warnings, found.phase or held, noted)
    if held is not None and held != found.phase:
        warnings += (f"its name says phase {found.phase}, its state {held}; the name counts",)
    return Reading(state, step, warnings, noted=noted)


def _state(path: Path) -> tuple[dict[str, Any], Mapping[str, object]]:
    """Return the state in a file, and what its record has besides it."""
    read: Any = formats.read(path, portable=True)
    if read.format == "burn" and isinstance(read.state["item"], dict):
        rest = {name: value for name, value in read.state.items() if name != "item"}
        return read.state["item"], {"record": rest}
    if read.format != "torch":
        if read.metadata:
            raise InvalidInput(
                "a record without the names of its values",
                where=path,
                expected="a record of NamedMpkFileRecorder, or a file of torch.save",
                found=read.metadata["format"],
                hint="Record it again by NamedMpkFileRecorder; `holdfast push` keeps its bytes.",
            )
        read = formats.read(path, format="torch", portable=True)  # which says what is wrong
    return read.state, {}


def _entry(found: Found, about: object) -> tuple[ForeignEntry, tuple[str, ...]]:
    """Return an entry of the pool by its metadata, with the keys that a checkout writes."""
    given = about if isinstance(about, dict) else {}
    version, games, pool = int(found.name), given.get("games_played", 0), load_preset(NAME).pool
    assert pool is not None
    rate, phase = given.get("win_rate") or 0, given.get("phase", pool.phase)
    for name, value, is_sound in (
        ("games_played", games, type(games) is int and 0 <= games < _MOST),
        ("win_rate", rate, type(rate) in (int, float) and 0 <= rate <= 1),
        ("version", version, 0 < version < _MOST and given.get("version", version) == version),
    ):
        if not is_sound:
            raise InvalidInput(f"not the {name} of the model", where=found.beside, found=value)
    rating = Rating(given.get("mu", DEFAULT.mu), given.get("sigma", DEFAULT.sigma))
    entry = ForeignEntry(
        version, check_phase(phase), check_step(found.step), rating, games, round(rate * games),
        _milliseconds(given.get("promoted_at")),
    )  # fmt: skip
    if given:
        return entry, ()
    return entry, ("it has no .meta.json file, and begins with the default rating",)


def _milliseconds(text: object) -> int | None:
    """Return a time of a file, in UTC unless it says otherwise; nothing if it is no time."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    if found is None:
        return None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
