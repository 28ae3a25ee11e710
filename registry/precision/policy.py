"""Precision policies: which tensors of a state are stored in fewer bits than they were given in.

Owns the choice, by patterns on paths, and what is refused; the arithmetic is `rounding`'s. A tensor
is rounded when its bytes are asked for, one at a time, so that a state is never there twice. What
was lossy is recorded with each tensor in the manifest.

Source: seeds/thalia.md, Mixed Precision. Optimizer state is left alone here unless somebody says
so: small second moments vanish in fp16, and a training that goes on from there is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import NoReturn

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.precision.optimizers import optimizer_leaves
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState
from holdfast.registry.storage.manifest import ORIGINAL_DTYPES, NarrowedDtype
from holdfast.registry.values.dtypes import ITEM_SIZES
from holdfast.registry.values.suggest import near

#: Policy -> the element type that a tensor is stored in. `auto` depends on its size.
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
POLICIES = ("fp16", "bf16", "auto", "keep")
#: `auto` makes tensors of at least so many bytes bf16: below there is little to be won, and biases,
#: norms and scales, which are small, gain most from their bits (seeds/thalia.md says 1 MB too).
AUTO_BYTES = 2**20
#: Not fp16: what has the range of float32 does not stop a training on the day a value passes 65504.
_AUTO_DTYPE = "bfloat16"
#: What others call them.
_ALIASES = {
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bfp16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "fp64", "float64", "full", "none"), "keep"),
    "mixed": "auto",
}
#: Share of a tensor's nonzero elements that may round to zero. A few always do where magnitudes
#: are spread about zero as those of weights are: of a normal distribution of deviation 1e-3 some
#: 2 in 100 000. A hundredth of it is small enough only if the tensor's scale is the type's limit.
_VANISHING_AT_MOST = 0.01
_LARGEST = {"float16": "65504", "bfloat16": "3.39e38"}

PrecisionPolicy = str | Mapping[str, str]
#: By component: number of a leaf -> the element type that it is stored in.
Narrowing = Sequence[Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Precision:
    """What precision the tensors of a save are stored in.

    Attributes:
        rules: Pattern of paths and policy; the first that matches a tensor is the one.
        allow_optimizer: Whether optimizer state is treated like the rest.
    """

    rules: tuple[tuple[str, str], ...]
    allow_optimizer: bool = False

    @classmethod
    def check(cls, given: object, *, allow_optimizer: bool = False) -> Precision | None:
        """Check what a save was given.

        Args:
            given: A policy for every tensor, or policies by pattern; nothing changes without it.
            allow_optimizer: Whether optimizer state may lose precision too.

        Raises:
            InvalidInput: It is neither, or there is no such policy.
        """
        if given is None or given == {}:
            return None
        rules = {"*": given} if isinstance(given, str) else given
        if not isinstance(rules, Mapping):
            raise InvalidInput(
                "not a precision",
                expected="a policy, or a mapping of patterns to policies",
                found=quoted(given),
                hint="For example precision={'model/*': 'bf16'}.",
            )
        for pattern, policy in rules.items():
            _check_rule(pattern, policy)
        return cls(tuple(rules.items()), allow_optimizer)

    def choose(self, state: FlatState, *, where: str) -> Narrowing:
        """Return which leaves of a state are stored in what type.

        Args:
            state: The state as it was given.
            where: What is saved, for messages.

        Raises:
            InvalidInput: A pattern decides about no tensor, or asks for optimizer state, which is
                not allowed, or tensors that share their memory would get different types.
        """
        uses = [_Use(pattern, policy) for pattern, policy in self.rules]
        chosen = [self._choose(part, uses) for part in state.components]
        for use in uses:
            use.check(state, where, allow_optimizer=self.allow_optimizer)
        _check_tied(state, chosen, where)
        return chosen

    def _choose(self, part: FlatComponent, uses: Sequence[_Use]) -> dict[int, str]:
        chosen = {}
        paths = [leaf.path for leaf in part.leaves]
        optimizer = optimizer_leaves(part)
        for number, leaf in enumerate(part.leaves):
            use = _first_match(uses, paths[number])
            if use is None:
                continue
            dtype = use.take(leaf, is_optimizer=number in optimizer)
            if dtype and (self.allow_optimizer or number not in optimizer):
                chosen[number] = dtype
        return chosen


@dataclass(slots=True)
class _Use:
    """A pattern, and what it met in one state."""

    pattern: str
    policy: str
    matched: bool = False
    others: int = 0
    optimizer: int = 0
    narrowable: str | None = None

    @property
    def is_for_all(self) -> bool:
        """Whether it means everything, not something in particular."""
        return not self.pattern.strip("*")

    def take(self, leaf: ArrayLeaf, *, is_optimizer: bool) -> str | None:
        """Count a tensor that falls to this pattern; return the type that it is to have, if any."""
        self.optimizer += is_optimizer
        self.others += not is_optimizer
        if leaf.dtype not in ORIGINAL_DTYPES or self.policy == "keep":
            return None
        if is_optimizer:
            self.narrowable = self.narrowable or leaf.path
        if self.policy == "auto":
            return _AUTO_DTYPE if leaf.nbytes >= AUTO_BYTES else None
        return _DTYPES[self.policy]

    def check(self, state: FlatState, where: str, *, allow_optimizer: bool) -> None:
        where = f"{where}, precision {self.pattern!r}"
        if not self.matched and not (self.is_for_all and not any(_leaves(state))):
            paths = [leaf.path for leaf in _leaves(state)]
            raise InvalidInput(
                "a pattern matches no tensor",
                where=where,
                hint=near(self.pattern, paths)
                or "Paths are components and keys joined with '/', as `holdfast show --tensors` "
                "lists them; `*` matches anything.",
            )
        if self.is_for_all:
            return
        if not self.optimizer + self.others:
            raise InvalidInput(
                "patterns before this one take every tensor of it",
                where=where,
                hint="The first pattern that matches decides: put the narrower one first.",
            )
        # What takes other tensors too does not ask for them, and passes them over.
        if self.narrowable and not self.others and not allow_optimizer:
            raise InvalidInput(
                "optimizer state would lose precision",
                where=where,
                found=self.narrowable,
                hint="Training on from it would not be the same: small moments vanish. Pass "
                "allow_lossy_optimizer=True (`--allow-lossy-optimizer`) if that is what you want.",
            )


def _check_tied(state: FlatState, chosen: Narrowing, where: str) -> None:
    """Refuse tensors of one memory in two types: they could not be loaded into it again."""
    if not any(chosen):
        return
    met: dict[tuple[object, ...], tuple[str, str]] = {}
    for part, narrowed in zip(state.components, chosen, strict=True):
        for number, leaf in enumerate(part.leaves):
            if leaf.dtype not in ORIGINAL_DTYPES or not leaf.nbytes:
                continue
            dtype = narrowed.get(number, leaf.dtype)
            other, same = met.setdefault(_memory(leaf), (leaf.path, dtype))
            if same != dtype:
                raise InvalidInput(
                    "tensors that share their memory would be stored in different types",
                    where=f"{where}, precision",
                    expected="one policy for all of them",
                    found=f"{other} in {same}, {leaf.path} in {dtype}",
                    hint="Give both the same policy, or save a copy of one of them.",
                )


def _memory(leaf: ArrayLeaf) -> tuple[object, ...]:
    """Return where a tensor or array lies, on whatever device, and how much it takes."""
    source = leaf.source
    if hasattr(source, "data_ptr"):
        return str(source.device), source.data_ptr(), leaf.nbytes
    if hasattr(source, "ctypes"):
        return "cpu", source.ctypes.data, leaf.nbytes
    return "its own", id(leaf), leaf.nbytes


def narrow_state(state: FlatState, narrowing: Narrowing) -> FlatState:
    """Return a state whose chosen leaves give their bytes rounded, when they are asked for.

    The same check is repeated on the numbers that are rounded: the program may have changed the
    leaf since.

    Raises:
        UnsupportedValue: A finite number would become infinity, or a part of a tensor zero; none of
            that leaf's component has been rounded yet.
    """
    components = []
    for part, chosen in zip(state.components, narrowing, strict=True):
        leaves = list(part.leaves)
        for number, dtype in chosen.items():
            _check_range(leaves[number], dtype)
            leaves[number] = _NarrowedLeaf(leaves[number], dtype)
        components.append(replace(part, leaves=tuple(leaves)))
    return FlatState(state.kind, tuple(components))


def stored_dtypes(state: FlatState, narrowing: Narrowing) -> Iterator[tuple[str, str]]:
    """Yield path and element type of every tensor as it is going to be stored."""
    for part, chosen in zip(state.components, narrowing, strict=True):
        for number, leaf in enumerate(part.leaves):
            yield leaf.path, chosen.get(number, leaf.dtype)


def stored_view(memory: memoryview, dtype: str, original: str) -> memoryview:
    """Return where in the memory of a tensor its narrower elements are to be read to."""
    tail: memoryview = _rounding().tail(memory, dtype, original)
    return tail


def widen_all(tensors: Iterable[tuple[memoryview, str, str]], pool: Executor) -> None:
    """Give tensors their original element type, where they lie; exact, what was lost stays lost.

    Args:
        tensors: Memory in the original type, with the narrower elements in `stored_view` of it;
            stored and original type.
        pool: Threads to do it with.
    """
    jobs = list(tensors)
    if jobs:
        list(pool.map(_rounding().widen, *zip(*jobs, strict=True)))


class _NarrowedLeaf(ArrayLeaf):
    """A tensor that is stored in a narrower type than the one that it has."""

    __slots__ = ()

    def __init__(self, leaf: ArrayLeaf, dtype: str) -> None:
        nbytes = leaf.nbytes // ITEM_SIZES[leaf.dtype] * ITEM_SIZES[dtype]
        named = NarrowedDtype(dtype, leaf.dtype)
        opener = partial(_rounded, dtype=dtype)
        super().__init__(named, leaf.shape, nbytes, leaf, opener, leaf._link, is_ours=True)


def _rounded(leaf: ArrayLeaf, nbytes: int, dtype: str) -> memoryview:
    """Round a leaf, part by part, and refuse numbers that the new type cannot hold."""
    rounding, item = _rounding(), ITEM_SIZES[dtype]
    made = memoryview(bytearray(nbytes))
    lost = nonzero = 0
    for part, start, stop in rounding.parts(leaf.buffer(), leaf.dtype):
        found = rounding.overflow(part, leaf.dtype, dtype)
        if found is not None:
            _refuse(leaf, dtype, found)
        some, of = rounding.vanishing(part, leaf.dtype, dtype)
        lost, nonzero = lost + some, nonzero + of
        made[start * item : stop * item] = rounding.narrow(part, leaf.dtype, dtype)
    leaf.release()
    _check_vanishing(leaf, dtype, lost, nonzero)
    return made


def _check_range(leaf: ArrayLeaf, dtype: str) -> None:
    found = _rounding().overflow(leaf.buffer(), leaf.dtype, dtype)
    lost, nonzero = (0, 0) if found else _rounding().vanishing(leaf.buffer(), leaf.dtype, dtype)
    leaf.release()
    if found is not None:
        _refuse(leaf, dtype, found)
    _check_vanishing(leaf, dtype, lost, nonzero)


def _check_vanishing(leaf: ArrayLeaf, dtype: str, lost: int, nonzero: int) -> None:
    policy = _policy(dtype)
    if lost > _VANISHING_AT_MOST * nonzero:
        raise UnsupportedValue(
            f"numbers that {policy} cannot hold: they would become zero",
            where=leaf.path,
            expected=f"at most {_VANISHING_AT_MOST:.0%} of those that are not zero to be so small",
            found=f"{lost} of {nonzero}",
            hint="Say 'keep' for this tensor"
            + (", or 'bf16', which has the range of float32." if policy == "fp16" else "."),
        )


def _refuse(leaf: ArrayLeaf, dtype: str, found: float) -> NoReturn:
    policy = _policy(dtype)
    raise UnsupportedValue(
        f"a number that {policy} cannot hold: it would become infinity",
        where=leaf.path,
        expected=f"at most {_LARGEST[dtype]} in magnitude",
        found=f"{found:g}",
        hint="Say 'keep' for this tensor"
        + (", or 'bf16', which has the range of float32." if policy == "fp16" else "."),
    )


def _policy(dtype: str) -> str:
    return next(name for name, made in _DTYPES.items() if made == dtype)


def _check_rule(pattern: object, policy: object) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidInput(
            "not a pattern", where="precision", expected="a text", found=quoted(pattern)
        )
    if policy not in POLICIES:
        lower = str(policy).lower()
        alias = lower if lower in POLICIES else _ALIASES.get(lower)
        raise InvalidInput(
            "there is no such precision",
            where=f"precision {pattern!r}",
            expected=", ".join(POLICIES),
            found=quoted(policy),
            hint=f"Did you mean {alias!r}?" if alias else near(str(policy), POLICIES),
        )


def _first_match(uses: Iterable[_Use], path: str) -> _Use | None:
    first = None
    for use in uses:
        # Later ones too, so that one that never comes first is told from one that fits nothing.
        if (first is None or not use.matched) and fnmatchcase(path, use.pattern):
            use.matched = True
            first = first or use
    return first


def _leaves(state: FlatState) -> Iterator[ArrayLeaf]:
    for component in state.components:
        yield from component.leaves


def _rounding() -> ModuleType:
    from holdfast.registry.precision import (
        rounding,  # with numpy, which a program that only lists needs not
    )

    return rounding
