"""Compare a stored state with the target to fill: paths, shapes, dtypes, shared memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from ctypes import addressof, c_char
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.loading.destinations import Destination, Extent, check_writable, overlaps
from holdfast.registry.objects import TensorEntry
from holdfast.registry.spec.precision import widen_all
from holdfast.registry.values import abridged, unknown

#: The prefix that `torch.compile` puts before the names of a module's tensors.
_COMPILED = "_orig_mod"
_FIT = "Give the target tensors of the stored shapes and types, or name another component."
_NAMES = "Name the right component, or pass strict=False to fill only the paths of both sides."


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of `load_into`."""

    loaded: tuple[str, ...]  # paths of the tensors that were filled
    missing: tuple[str, ...]  # paths in the target that the checkpoint does not have
    unexpected: tuple[str, ...]  # paths in the checkpoint that the target does not have

    @classmethod
    def of(cls, sources: Collection[str], leaves: Collection[str]) -> LoadReport:
        """Compare the paths of a checkpoint and of a target."""
        if set(sources) == set(leaves):
            return cls(tuple(sources), (), ())
        return cls(
            loaded=tuple(path for path in sources if path in leaves),
            missing=tuple(path for path in leaves if path not in sources),
            unexpected=tuple(path for path in sources if path not in leaves),
        )


class _Leaf(Protocol):
    dtype: str
    shape: tuple[int, ...]


def leaves_by_path(target: pytree.FlatState) -> dict[str, pytree.ArrayLeaf]:
    """Return the tensors and arrays of a target by path; long strings are none."""
    return pytree.by_path(
        leaf for leaf in target.leaves if not isinstance(leaf.source, (bytes, bytearray, str))
    )


def filled_once(
    ref: str, sources: Mapping[str, TensorEntry], leaves: Mapping[str, pytree.ArrayLeaf]
) -> list[str]:
    """Return the paths of a target that are filled; of equal views only the first."""
    shared = [path for path in sources if path in leaves]
    if _are_apart(leaves[path] for path in shared):
        return shared
    extents = {}
    for path in sources:
        if path in leaves:
            leaf = leaves[path]
            if hasattr(leaf.source, "addressable_shards"):  # of jax
                raise IncompatibleState(
                    "an array of jax cannot be filled",
                    where=f"{ref}: {path}",
                    hint="Make another: jax.make_array_from_callback(shape, sharding, "
                    "lambda index: checkpoint[path][index]).",
                )
            extents[path] = Extent.of(leaf.source, leaf.dtype, leaf.shape)
            check_writable(f"{ref}: {path}", leaf.source, extents[path])
    again = set()
    for first, second in overlaps(extents):
        if extents[first] != extents[second]:
            raise IncompatibleState(
                "two tensors of the target share memory and are not the same",
                where=f"{ref}: {first} and {second}",
                hint="Give each memory of its own: .clone() or .copy().",
            )
        if sources[first].content != sources[second].content:
            raise IncompatibleState(
                "two tensors of the target share memory and differ in the checkpoint",
                where=f"{ref}: {first} and {second}",
                hint="Untie them, or load one of the two into a tensor of its own.",
            )
        again.add(second)
    return [path for path in extents if path not in again]


def _are_apart(leaves: Iterable[pytree.ArrayLeaf]) -> bool:
    """Return whether all are contiguous on the host and writable, and no two share memory."""
    spans = []
    for leaf in leaves:
        view = leaf.in_place()
        if view is None:
            return False
        if view.nbytes:
            spans.append((addressof(c_char.from_buffer(view)), view.nbytes))
    spans.sort()
    return all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))


def widened_paths(
    sources: Mapping[str, TensorEntry], leaves: Mapping[str, _Leaf]
) -> dict[str, str]:
    """Return the paths at which the target has the original type of a narrowed tensor.

    The value of each path is the stored type.
    """
    return {
        path: entry.dtype
        for path, entry in sources.items()
        if entry.original is not None and path in leaves and entry.original == leaves[path].dtype
    }


def settle(into: Mapping[str, Destination], pool: Executor) -> None:
    """Finish tensors after reading: widen them in place, or copy staged ones to their target."""
    widen_all((one.widening for one in into.values() if one.widening), pool)
    for destination in into.values():
        destination.settle()


def check_components(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check that a state has some components."""
    known = list(known)
    for name in names:
        if name not in known:
            raise unknown("no such component", where, name, known)


def check_fit(
    ref: str,
    report: LoadReport,
    sources: Mapping[str, TensorEntry],
    leaves: Mapping[str, _Leaf],
    *,
    strict: bool,
    widened: Collection[str] = (),
) -> None:
    """Refuse a state that does not fit the target."""
    wrong = []
    for path in report.loaded:
        have, want = sources[path], leaves[path]
        dtype = have.original if path in widened else have.dtype
        if dtype != want.dtype or have.shape != want.shape:
            was = "" if have.original is None else f" ({have.original} before its save)"
            wrong.append(
                f"{path} is {have.dtype}{list(have.shape)}, "
                f"target {want.dtype}{list(want.shape)}{was}"
            )
    hint = _FIT if wrong else _NAMES
    if strict:
        wrong += [f"{path} is not in the checkpoint" for path in report.missing]
        wrong += [f"{path} is not in the target" for path in report.unexpected]
    if not wrong:
        return
    raise IncompatibleState(
        "the checkpoint does not fit the target",
        where=ref,
        found=abridged(wrong),
        hint="Nothing was changed. " + (_wrapped(report) or hint),
    )


def check_any_fits(ref: str, report: LoadReport) -> None:
    """Refuse a state that has no tensor of a target."""
    if report.loaded or not (report.missing or report.unexpected):
        return
    raise IncompatibleState(
        "the checkpoint has no tensor of the target",
        where=ref,
        expected=_some(report.missing),
        found=_some(report.unexpected),
        hint="Nothing was changed. " + (_wrapped(report) or "Name the right component."),
    )


def check_component(component: object) -> str | None:
    """Return the name of a component, or `None` for all."""
    if component is None or isinstance(component, str):
        return component
    raise InvalidInput(
        "not the name of a component",
        where="component",
        expected="a string, or None",
        found=quoted(component),
    )


def _wrapped(report: LoadReport) -> str:
    """Return a hint if the paths of one side come from a compiled or a distributed module."""
    if any(_COMPILED in path.replace("/", ".").split(".") for path in report.missing):
        return f"The target is compiled: pass the module inside, `model.{_COMPILED}`."
    if any(_COMPILED in path.replace("/", ".").split(".") for path in report.unexpected):
        return f"A compiled module was saved: save the one inside, `model.{_COMPILED}`, or compile."
    if _inside(report.missing) & set(report.unexpected):
        return "The target is a DistributedDataParallel: pass the module inside, `model.module`."
    if _inside(report.unexpected) & set(report.missing):
        return "A DistributedDataParallel was saved: save the module inside, `model.module`."
    return ""


def _inside(paths: Iterable[str]) -> set[str]:
    """Return the paths below `module.` as the module inside has them."""
    cut = {path: f"/{path}".replace("/module.", "/", 1)[1:] for path in paths}
    return {inner for path, inner in cut.items() if inner != path}


def _some(paths: Sequence[str]) -> str:
    return abridged(paths, ", ") or "no tensor"
