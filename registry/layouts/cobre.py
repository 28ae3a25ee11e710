"""Cobre: a policy folder for each checkpoint, and `latest`, a link to the newest.

The document names no folders, and the real program overwrites one folder, `policy/`. Here each
checkpoint is `policy_NNNNNN/`, by its iteration; `policy/` is read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import Hint, IncompatibleState
from holdfast.registry.formats import StoredContent, portable
from holdfast.registry.formats.cobre import policy
from holdfast.registry.layouts.contents import RunContents, imported_as
from holdfast.registry.layouts.patterns import fields_of, written
from holdfast.registry.layouts.table import Entry, Found, Link, Reading, StateFile
from holdfast.registry.loading import Checkpoint
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.presets import load_preset

NAME: Final = "cobre"
SIDECARS: Final = False
COMPANIONS: Final = False
CHECKPOINT: Final = "policy_{step:06d}"
REAL: Final = "policy"
LATEST: Final = "latest"
DICTIONARY: Final = "training/dictionaries/state_dictionary.json"
_PARTS: Final = ("metadata", "cuts", "basis", "states")


def spec() -> RunSpec:
    """Return the preset."""
    return load_preset(NAME)


def entries(run: RunContents) -> Iterator[Entry]:
    """Yield a folder for each checkpoint, `latest`, and the dictionary of the state."""
    paths = {}
    for one in run.checkpoints:
        is_real = imported_as(one, NAME).get("file") == REAL and one == run.latest()
        paths[one.handle.n] = REAL if is_real else written(CHECKPOINT, {"step": one.step})
        key = f"{one.handle.n}:{one.digest}"
        yield StateFile(paths[one.handle.n], one, NAME, key, state=lambda one=one: _policy(one))  # type: ignore[misc]
    latest = run.latest()
    if latest is not None and paths[latest.handle.n] != REAL:
        yield Link(LATEST, paths[latest.handle.n])
    for name, artifact in run.artifacts.items():
        if name == Path(DICTIONARY).stem:
            yield StateFile(DICTIONARY, artifact, "opaque", str(artifact.digest))


def _policy(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the parts that a policy folder has."""
    known = [name for name in _PARTS if name in checkpoint.components]
    if "metadata" not in known:
        raise IncompatibleState(
            "a policy folder needs the metadata of a policy",
            where=checkpoint.ref,
            expected="a component `metadata` with cobre_version, created_at and the other fields",
            found=", ".join(checkpoint.components),
            hint=Hint(
                "Save it with the state: `holdfast.formats.read(DIR)` shows its form.",
                "`holdfast push DIR` stores a folder with it.",
            ),
        )
    return portable(StoredContent(checkpoint, known))


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
    """Read a policy; the keys that the preset requires are made from its metadata."""
    read: Any = policy.read(path).state
    state, about = dict(read), read["metadata"]
    step = about["completed_iterations"]
    state |= {
        "completed_iterations": step,
        "rng_state": {"rng_seed": about["rng_seed"]},
        "convergence": {
            "final_lower_bound": about["final_lower_bound"],
            "best_upper_bound": about["best_upper_bound"],
        },
        "state_dimension": about["state_dimension"],
        "num_stages": about["num_stages"],
    }
    if found.step in (None, step):
        return Reading(state, step)
    return Reading(state, step, (f"its name says iteration {found.step}, its metadata {step}",))


def is_complete(path: Path) -> bool | None:
    """Return `False` while the metadata is missing. It may be an older file, so time decides."""
    if path.is_dir():
        return None if (path / "metadata.json").is_file() else False
    return None
