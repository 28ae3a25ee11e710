"""What a specification demands of a state: its top-level keys and the element types of its tensors.

Checked when a state is saved, before anything is written, and when a whole one is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec import RunSpec
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.values.dtypes import FLOATING
from holdfast.registry.values.suggest import near

_NAMED_AT_MOST = 8


def check_phase_is_declared(spec: RunSpec, phase: str) -> None:
    """Refuse a phase that the run does not have.

    Raises:
        InvalidInput: Phases are declared, and this one is not.
    """
    declared = [one.name for one in spec.phases]
    if declared and phase not in declared:
        raise InvalidInput(
            "the run has no such phase",
            where=f"phase {phase}",
            expected=f"one of {', '.join(declared)}",
            hint=near(phase, declared) or "Phases are declared by the run's preset.",
        )


def check_keys(spec: RunSpec, phase: str, names: Collection[str], *, where: str) -> None:
    """Check that a state has every top-level key that its phase requires.

    Raises:
        IncompatibleState: Some are missing; the message names them.
    """
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
    """Check the element types of floating-point tensors.

    Args:
        spec: The rules.
        tensors: Path and dtype of each tensor.
        where: What is checked, for messages.

    Raises:
        IncompatibleState: Some have another one; the message names them.
    """
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
        more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
        raise IncompatibleState(
            "tensors have another dtype than the run demands",
            where=where,
            found="; ".join(wrong[:_NAMED_AT_MOST]) + more,
            hint="Cast them, if that is what you want; nothing is cast silently.",
        )


def first_of(key: str, names: Collection[str]) -> str | None:
    """Return the first of the alternatives `a | b` that is among the names."""
    for name in key.split("|"):
        if name.strip() in names:
            return name.strip()
    return None


def inference_parts(spec: RunSpec, parts: Iterable[str], *, where: str) -> list[str]:
    """Return the components that inference needs: all of them where the specification says nothing.

    Args:
        spec: Of the run.
        parts: Components of the state.
        where: What the state is of, for messages.

    Raises:
        IncompatibleState: The specification says what it needs, and none of it is there.
    """
    present = list(parts)
    if not spec.inference:
        return present
    found = [name for key in spec.inference if (name := first_of(key, present))]
    if not found:
        raise IncompatibleState(
            "nothing of what inference needs is in this state",
            where=where,
            expected=", ".join(spec.inference),
            found=", ".join(present),
            hint="Name components by only=[...] where that is offered, or mend the preset.",
        )
    return found


def flat_dtypes(state: FlatState) -> Iterator[tuple[str, str]]:
    """Yield path and dtype of every tensor of a state that is being saved."""
    for component in state.components:
        for leaf in component.leaves:
            yield leaf.path, leaf.dtype


def manifest_dtypes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield path and dtype of every tensor of a stored state."""
    for name, part in manifest.components.items():
        for index, path in pytree.leaf_paths(name, part.skeleton).items():
            yield path, part.tensors[index].dtype
