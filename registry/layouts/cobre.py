"""Cobre: a policy folder for each checkpoint, and `latest`, a link to the newest.

The document names no folders, and the real program overwrites one folder, `policy/`. Here each
checkpoint is `policy_NNNNNN/`, by its iteration; `policy/` is read too.

A state has the keys that the preset requires. Its tables are files; its other keys stand in
`metadata.json`, whose own fields are made from them and from the run. The program passes over keys
that it does not know. The key `holdfast` there says which keys the state has, and which of their
values JSON has in another form, so that the same state comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats import StoredContent, portable
from holdfast.registry.formats.cobre import policy
from holdfast.registry.history import decode_plain, plain_digest
from holdfast.registry.layouts.contents import RunContents, import_notes, imported_as
from holdfast.registry.layouts.scanning import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile
from holdfast.registry.loading import Checkpoint

NAME: Final = "cobre"
SIDECARS: Final = False
COMPANIONS: Final = False
STEPPED: Final = False
CHECKPOINT: Final = "policy_{step:06d}"
REAL: Final = "policy"
LATEST: Final = "latest"
DICTIONARY: Final = "training/dictionaries/state_dictionary.json"
#: Release whose files are written, and the last one whose cuts have a domination count.
_WRITTEN_AS: Final = "0.5.1"
_WITH_DOMINATION: Final = "0.4.4"
_BOUNDS: Final = ("final_lower_bound", "best_upper_bound")
#: Key of the metadata for what a checkout says of the state.
_FORM: Final = "holdfast"


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield a folder for each checkpoint, `latest`, and the dictionary of the state."""
    paths = {}
    for one in run.checkpoints:
        is_real = imported_as(one, NAME).get("file") == REAL and one == run.latest()
        paths[one.handle.n] = REAL if is_real else written(CHECKPOINT, {"step": one.step})
        key = f"{one.handle.n}:{one.digest}"
        yield StateFile(paths[one.handle.n], one, NAME, key, state=lambda one=one: policy_of(one))  # type: ignore[misc]
    latest = run.latest()
    if latest is not None and paths[latest.handle.n] != REAL:
        yield Link(LATEST, paths[latest.handle.n])
    for name, artifact in run.artifacts.items():
        if name == Path(DICTIONARY).stem:
            yield StateFile(DICTIONARY, artifact, "opaque", str(artifact.digest))


def policy_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parts of a policy folder for a checkpoint of a run."""
    state = policy.as_arrays(portable(StoredContent(checkpoint, None)))
    tables = {key: state[key] for key in policy.FOLDERS if key in state}
    given = state.get("metadata", {})
    forms: dict[str, Any] = {}
    rest = {
        key: _plain(value, key, forms)
        for key, value in state.items()
        if key not in (*policy.FOLDERS, "metadata")
    }
    if not isinstance(given, dict) or (given and not forms and rest in ({}, required(given))):
        return {"metadata": given, **tables}  # the format refuses what is no dict
    bounds = _bounds(state.get("convergence"))
    noted = import_notes(checkpoint.handle.record, NAME).get("metadata")
    made = _of_run(checkpoint, tables, state) | bounds
    about = made | (noted if isinstance(noted, dict) else {}) | given | rest
    own = {_FORM: "that of the checkout"} | bounds | rest
    wrong = [f"{key} is missing" for key in policy.REQUIRED if key not in about]
    wrong += [
        f"{key} is {given[key]!r} in the metadata and {own[key]!r} in the state"
        for key in given
        if given[key] != own.get(key, given[key])
    ]
    if wrong or _FORM in rest:
        raise IncompatibleState(
            "the state and its run do not give the metadata of a policy",
            where=checkpoint.ref,
            expected="max_iterations and forward_passes in the configuration; in the state a "
            "convergence with lower and upper, lists or arrays of the bounds",
            found="; ".join(wrong)[:500] or f"a key named {_FORM}",
            hint="Save what is missing with the state, by these names; leave out metadata that "
            "says something else than the rest of it.",
        )
    about[_FORM] = {"keys": list(state), "metadata": list(given), "forms": forms}
    return {"metadata": about, **tables}


def _of_run(one: Checkpoint, tables: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the metadata that a state and its run have under other names."""
    created, encoded = one.handle.log.run.created, one.handle.log.run.config_at(one.handle.n)
    assert created is not None  # it has a checkpoint
    config, seed = decode_plain(encoded), int(created.seed, 16)
    counts = _of_stages(tables.get("cuts"), lambda one: int(one["warm_start_count"]))
    is_old = any(_of_stages(tables.get("cuts"), lambda one: "domination_count" in one["cuts"]))
    rng = state.get("rng_state")
    known = ("max_iterations", "forward_passes")
    given = {key: config[key] for key in known if isinstance(config, dict) and key in config}
    return given | {
        "cobre_version": _WITH_DOMINATION if is_old else _WRITTEN_AS,
        "created_at": f"{one.created:%Y-%m-%dT%H:%M:%SZ}",
        "config_hash": plain_digest(encoded).hex(),
        "system_hash": created.input_hash or "",
        "warm_start_cuts": max(counts, default=0),
        "warm_start_counts": counts,
        "rng_seed": rng.get("rng_seed", seed) if isinstance(rng, dict) else seed,
        "total_visited_states": sum(
            _of_stages(tables.get("states"), lambda one: int(one["count"]))
        ),
    }


def _bounds(traces: Any) -> dict[str, Any]:
    """Return the bounds of a history of convergence, as far as it has them."""
    if not isinstance(traces, dict):
        return {}
    found: dict[str, Any] = {}
    try:
        lower, upper = (np.asarray(traces.get(key, ()), float) for key in ("lower", "upper"))
    except (TypeError, ValueError):
        lower = upper = np.zeros(0)
    if lower.ndim == upper.ndim == 1 and len(lower):
        finite = upper[np.isfinite(upper)]
        found["final_lower_bound"] = float(lower[-1])
        found["best_upper_bound"] = float(finite.min()) if len(finite) else None
    return found | {key: traces[key] for key in _BOUNDS if key in traces}


def _of_stages(table: Any, what: Callable[[Any], int]) -> list[int]:
    """Return a number of each stage, in their order; none of a table that the format refuses."""
    try:
        return [what(one) for one in sorted(table.values(), key=lambda one: one["stage_id"])]
    except (AttributeError, LookupError, TypeError, ValueError):
        return []


def required(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the preset requires, from metadata that has no others."""
    return {
        "completed_iterations": about.get("completed_iterations"),
        "rng_state": {"rng_seed": about.get("rng_seed")},
        "convergence": {key: about.get(key) for key in _BOUNDS},
        "state_dimension": about.get("state_dimension"),
        "num_stages": about.get("num_stages"),
    }


# Values as JSON has them


def _plain(value: Any, path: str, forms: dict[str, Any]) -> Any:
    """Return a value as JSON has it; note what it was, by its path, where JSON has another form."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        forms[path] = "float"
        return repr(value)
    if type(value) is dict and all(type(key) is str and "/" not in key for key in value):
        return {key: _plain(item, f"{path}/{key}", forms) for key, item in value.items()}
    if type(value) in (list, tuple):
        if type(value) is tuple:
            forms[path] = "tuple"
        return [_plain(item, f"{path}/{at}", forms) for at, item in enumerate(value)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        shape = list(value.shape)
        if shape and math.prod(shape[1:]):
            shape[0] = -1  # a program may add rows
        forms[path] = [value.dtype.name, shape]
        flat = value.reshape(-1).tolist()
        return [one if math.isfinite(one) else repr(one) for one in flat]
    raise IncompatibleState(
        "the metadata of a policy has no form for this value",
        where=path,
        expected="dicts with text as keys, lists, tuples, text, numbers, arrays of numbers",
        found=type(value).__name__,
        hint="Keep it out of the state, or pull the checkpoint to a .pt file.",
    )


def _formed(value: Any, path: str, forms: Mapping[str, Any]) -> Any:
    """Return the value that `_plain` has written."""
    form = forms.get(path)
    if form == "float":
        return float(value)
    if isinstance(form, list):
        name, shape = form
        if np.dtype(name).kind not in "biuf":
            raise ValueError("not a type of numbers")
        if np.dtype(name).kind == "f":
            value = [float(one) for one in value]
        return np.array(value, name).reshape(shape)
    if isinstance(value, dict):
        return {key: _formed(item, f"{path}/{key}", forms) for key, item in value.items()}
    if isinstance(value, list):
        made = [_formed(item, f"{path}/{at}", forms) for at, item in enumerate(value)]
        return tuple(made) if form == "tuple" else made
    return value


def find(files: Mapping[str, str | None]) -> Iterable[Found]:
    """Yield the policies by iteration, then the dictionary."""
    folders = {path.partition("/")[0] for path in files if path.count("/") >= 1}
    steps = [(fields["step"], name) for name in folders if (fields := fields_of(CHECKPOINT, name))]
    for step, name in sorted(steps):
        yield Found(name, "checkpoint", NAME, phase="training", step=step)
    if f"{REAL}/metadata.json" in files or REAL in folders:
        yield Found(REAL, "checkpoint", NAME, phase="training")
    if DICTIONARY in files:
        yield Found(DICTIONARY, "artifact", "opaque", Path(DICTIONARY).stem)


def reading(found: Found, path: Path, options: Mapping[str, Any]) -> Reading:  # noqa: ARG001
    """Read a policy as the state that was checked out, or as one with the required keys."""
    state: Any = policy.read(path).state
    about, noted = state["metadata"], {}
    step = about["completed_iterations"]
    if _FORM in about:
        try:
            state, more = _checked_out(state, about, **about[_FORM])
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidInput(
                f"the key {_FORM} does not fit the rest of the metadata",
                where=path / "metadata.json",
                found=error,
                hint="Remove the key, to import what the program itself reads.",
            ) from error
        noted = {"metadata": more, "config_hash": about.get("config_hash")}
    else:
        state |= required(about)
    noted["input_hash"] = about.get("system_hash")
    noted = {key: value for key, value in noted.items() if value}
    warning = f"its name says iteration {found.step}, its metadata {step}"
    return Reading(state, step, () if found.step in (None, step) else (warning,), noted=noted)


def _checked_out(
    read: Mapping[str, Any],
    about: Mapping[str, Any],
    keys: Sequence[str],
    metadata: Sequence[str],
    forms: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that was checked out, and the metadata that it does not have."""
    state = {}
    for key in keys:
        if key == "metadata":
            state[key] = {name: about[name] for name in metadata}
        else:
            state[key] = read[key] if key in policy.FOLDERS else _formed(about[key], key, forms)
    state |= {key: read[key] for key in policy.FOLDERS if key in read}
    has = {*keys, *metadata, _FORM}
    return state, {key: value for key, value in about.items() if key not in has}


def is_complete(path: Path) -> bool | None:
    """Return `False` while the metadata is missing. It may be an older file, so time decides."""
    if path.is_dir():
        return None if (path / "metadata.json").is_file() else False
    return None
