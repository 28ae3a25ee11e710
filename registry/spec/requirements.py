"""Check a state against its specification: top-level keys and element types of tensors.

A save checks before anything is written; loading a whole state checks too. `doubts` looks at the
specification itself: it warns of settings that are legal and may be mistakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from holdfast.registry import pytree
from holdfast.registry.errors import Hint, IncompatibleState, InvalidInput
from holdfast.registry.objects import Manifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import FLOATING, abridged, near


def check_phase_is_declared(spec: RunSpec, phase: str) -> None:
    """Refuse a phase that the run does not have."""
    declared = [one.name for one in spec.phases]
    if declared and phase not in declared:
        raise InvalidInput(
            "the run has no such phase",
            where=f"phase {phase}",
            expected=f"one of {', '.join(declared)}",
            hint=near(phase, declared) or "The run's preset declares its phases.",
        )


def check_keys(spec: RunSpec, phase: str, names: Collection[str], *, where: str) -> None:
    """Check that a state has every top-level key that its phase requires."""
    required = (*spec.required_keys, *spec.phase(phase).required_keys)
    missing = [key for key in required if first_of(key, names) is None]
    if missing:
        raise IncompatibleState(
            f"a state of phase {phase} lacks required keys",
            where=where,
            expected=", ".join(required),
            found=f"{', '.join(names)}; missing: {', '.join(missing)}",
            hint="Put them into the state, or use a preset that does not require them.",
        )


def check_dtypes(spec: RunSpec, tensors: Iterable[tuple[str, str]], *, where: str) -> None:
    """Check the element types of floating-point tensors."""
    if not spec.dtypes:
        return
    wrong = [
        f"{path} is {dtype}, must be {rule.dtype}"
        for path, dtype in tensors
        if dtype in FLOATING
        for rule in spec.dtypes
        if dtype != rule.dtype and fnmatchcase(path, rule.path)
    ]
    if wrong:
        raise IncompatibleState(
            "tensors have another dtype than the run requires",
            where=where,
            found=abridged(wrong),
            hint="Cast them yourself if you want that: a save never casts them.",
        )


def first_of(key: str, names: Collection[str]) -> str | None:
    """Return the first of the alternatives `a | b` that is in the names."""
    for name in key.split("|"):
        if name.strip() in names:
            return name.strip()
    return None


def inference_parts(spec: RunSpec, parts: Iterable[str], *, where: str) -> list[str]:
    """Return the components that inference needs: all, if the specification does not name them."""
    present = list(parts)
    if not spec.inference:
        return present
    found = [name for key in spec.inference if (name := first_of(key, present))]
    if not found:
        raise IncompatibleState(
            "this state has none of the components that inference needs",
            where=where,
            expected=", ".join(spec.inference),
            found=", ".join(present),
            hint=Hint(
                "Name components by only=[...] where that is possible, or correct the preset.",
                "Choose components by `--only`, or correct the preset.",
            ),
        )
    return found


def flat_dtypes(state: FlatState) -> Iterator[tuple[str, str]]:
    """Return path and dtype of every tensor of a state that is being saved."""
    return ((leaf.path, leaf.dtype) for leaf in state.leaves)


def manifest_dtypes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield path and dtype of every tensor of a stored state."""
    for name, part in manifest.components.items():
        for index, path in pytree.leaf_paths(name, part.skeleton).items():
            yield path, part.tensors[index].dtype


def doubts(spec: RunSpec) -> Iterator[str]:
    """Yield warnings of settings that are allowed, but may be mistakes."""
    required = [*spec.required_keys, *(key for one in spec.phases for key in one.required_keys)]
    named = {name.strip() for key in required for name in key.split("|")}
    patterns = [("finite", path) for path in spec.finite]
    patterns += [("dtypes", rule.path) for rule in spec.dtypes]
    for field, path in patterns:
        key, slash, _ = path.partition("/")
        if not slash and "*" not in key and (field, f"{key}/*") not in patterns:
            yield f"{field}: {path!r} matches no path below this key; {f'{path}/*'!r} does"
        yield from _unrequired(field, key, named)
    for field, keys in (("required_keys", named), ("inference", spec.inference)):
        for key in sorted(keys):
            if "/" in key or "*" in key:
                yield f"{field}: {key!r} is a pattern, and top-level keys are meant"
            elif field == "inference":
                yield from _unrequired(field, key, named)


def _unrequired(field: str, key: str, named: set[str]) -> Iterator[str]:
    if named and named.isdisjoint(one.strip() for one in key.split("|")) and "*" not in key:
        meant = near(key, named)
        more = f". {meant}" if meant else ""
        yield f"{field}: no state must have {key!r}, which required_keys leave out{more}"
