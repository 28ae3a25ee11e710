"""Precision policies: they select, by patterns on paths, tensors to store in fewer bits.

Also checks that the narrower type can hold the numbers; `rounding` does the arithmetic. A tensor is
rounded when its bytes are read, one at a time, so a state is never in memory twice. The manifest
records the original type of each rounded tensor.

Source: document of Thalia, Mixed Precision. Optimizer state keeps its type unless the caller allows
otherwise: small second moments become zero in fp16, and the training would continue differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import ModuleType
from typing import NoReturn, get_args

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Hint, InvalidInput, UnsupportedValue
from holdfast.registry.objects import ORIGINAL_DTYPES, NarrowedDtype
from holdfast.registry.pytree import DICTS, ArrayLeaf, FlatComponent, FlatState
from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import ITEM_SIZES, Json, PrecisionName, near

#: Keys that optimizers have in a state: `optimizer`, `actor_optim`, `opt_state`.
_OPTIMIZER = re.compile(
    r"(?:.*[_.-])?opt(?:im)?s?(?:[_.\-\d].*)?|.*optimi[sz]er.*", re.IGNORECASE | re.DOTALL
)
#: Names of the tensors that torch's optimizers keep for a parameter, alone or after a dot. They are
#: enough without `param_groups`. Names that models use too (`sum`, `step`) are not in this list.
_MOMENT = re.compile(
    r"(?:.*\.)?(?:(?:max_)?exp_avg(?:_.*)?|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta)",
    re.DOTALL,
)
#: The names of optax, which are moments only together; one of them alone may be a model's mean.
_MU_NU = frozenset(("mu", "nu"))
#: Keys of the result of `torch.optim.Optimizer.state_dict`.
_OPTIMIZER_KEYS = {"state", "param_groups"}


def optimizer_leaves(part: FlatComponent) -> set[int]:
    """Return the numbers of the leaves that are optimizer state, by their keys or by its shape."""
    paths = [leaf.path for leaf in part.leaves]
    moments = _moments(paths)
    found = {
        number
        for number, path in enumerate(paths)
        if any(_is_optimizer_key(step) for step in _containers(path))
        or any(_is_moment_key(step) for step in path.split("/"))
        or path in moments
    }
    stack: list[tuple[Json, bool]] = [(part.skeleton, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, list):
            stack += [(child, inside) for child in node if isinstance(child, (list, dict))]
        elif isinstance(node, dict):
            for tag, payload in node.items():
                if inside and tag in ("t", "n") and isinstance(payload, int):
                    found.add(payload)
                elif isinstance(payload, (list, dict)):
                    stack.append((payload, inside or _is_optimizer(tag, payload)))
    return found


def _moments(paths: Iterable[str]) -> set[str]:
    """Return the paths below a `mu` and a `nu` with the same parent."""
    beside: dict[str, set[str]] = {}
    below: dict[str, list[str]] = {}
    for path in paths:
        steps = path.split("/")
        for at, step in enumerate(steps):
            if step in _MU_NU:
                parent = "/".join(steps[:at])
                beside.setdefault(parent, set()).add(step)
                below.setdefault(parent, []).append(path)
    return {path for parent, met in beside.items() if met == _MU_NU for path in below[parent]}


def _containers(path: str) -> list[str]:
    """Return the keys of the containers of a tensor; for a bare tensor its own key."""
    steps = path.split("/")
    return steps[:-1] or steps


@lru_cache(maxsize=4096)  # a state has thousands of tensors under a few keys
def _is_optimizer_key(step: str) -> bool:
    return _OPTIMIZER.fullmatch(step) is not None


@lru_cache(maxsize=4096)  # the tensors' own keys repeat as well
def _is_moment_key(step: str) -> bool:
    return _MOMENT.fullmatch(step) is not None


def _is_optimizer(tag: str, payload: Json) -> bool:
    """Return whether a node is a dict with the keys of an optimizer's state_dict."""
    if tag not in DICTS or not isinstance(payload, list):
        return False
    index = DICTS[tag]
    pairs = payload if index is None else payload[index] if index < len(payload) else None
    if not isinstance(pairs, list):
        return False
    keys = [pair[0] for pair in pairs if isinstance(pair, list) and pair]
    return all(key in keys for key in _OPTIMIZER_KEYS)


#: Policy -> the element type in which a tensor is stored. `auto` depends on the tensor's size.
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
POLICIES: tuple[PrecisionName, ...] = get_args(PrecisionName)
#: `auto` stores tensors of at least this many bytes as bf16, `auto-fp16` larger ones as fp16.
#: Smaller ones save little space, and biases, norms and scales, which are small, need their bits
#: most (document of Thalia: 1 MB too).
AUTO_BYTES = 2**20
#: Not fp16: in a type with the range of float32 no save fails when a value passes 65504.
_AUTO_DTYPE = "bfloat16"
#: Other names that people use for the policies.
_ALIASES = {
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bfp16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "fp64", "float64", "full", "none"), "keep"),
    "mixed": "auto",
}
#: The share of a tensor's nonzero elements that may round to zero. A few of any weights do: 2 in
#: 100 000 of a normal distribution of deviation 1e-3. If more than one in a hundred do, the whole
#: tensor is near the smallest numbers of the type.
_VANISHING_AT_MOST = 0.01
_LARGEST = {"float16": "65504", "bfloat16": "3.39e38"}

PrecisionPolicy = str | Mapping[str, str]
#: For each component: number of a leaf -> the element type in which it is stored.
Narrowing = Sequence[Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of the tensors of a save."""

    #: Pattern of paths and policy; the first pattern that matches a tensor decides.
    rules: tuple[tuple[str, str], ...]
    allow_optimizer: bool = False  # whether optimizer state may lose precision too
    #: The name that was given instead of rules; a preset may have rules of this name.
    name: str | None = None
    #: Whether the rules are those of a preset, where a pattern may match nothing.
    is_preset: bool = False

    @classmethod
    def check(cls, given: object, *, allow_optimizer: bool = False) -> Precision | None:
        """Check the `precision` argument of a save."""
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
        if isinstance(given, str):
            return cls(tuple(rules.items()), allow_optimizer, name=given)
        for pattern, policy in rules.items():
            _check_rule(pattern, policy)
        return cls(tuple(rules.items()), allow_optimizer)

    def resolved(self, spec: RunSpec) -> Precision:
        """Return the rules of the run's preset, if the name is one of it."""
        if self.name is None:
            return self
        for one in spec.precision or ():
            if one.name == self.name:
                rules = tuple((rule.path, rule.policy) for rule in one.rules)
                return Precision(rules, self.allow_optimizer, is_preset=True)
        for pattern, policy in self.rules:
            _check_rule(pattern, policy, [one.name for one in spec.precision or ()])
        return self

    def choose(self, state: FlatState, *, where: str) -> Narrowing:
        """Return the leaves of a state to store in a narrower type, with that type."""
        uses = [_Use(pattern, policy) for pattern, policy in self.rules]
        chosen = [self._choose(part, uses) for part in state.components]
        for use in () if self.is_preset else uses:
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
    """A pattern, and the tensors of one state that it selected."""

    pattern: str
    policy: str
    matched: bool = False
    others: int = 0
    optimizer: int = 0
    narrowable: str | None = None

    @property
    def is_for_all(self) -> bool:
        """Whether the pattern selects everything."""
        return not self.pattern.strip("*")

    def take(self, leaf: ArrayLeaf, *, is_optimizer: bool) -> str | None:
        """Count a tensor that this pattern selects; return its narrower type, if it gets one."""
        self.optimizer += is_optimizer
        self.others += not is_optimizer
        if leaf.dtype not in ORIGINAL_DTYPES or self.policy == "keep":
            return None
        if is_optimizer:
            self.narrowable = self.narrowable or leaf.path
        if self.policy == "auto":
            return _AUTO_DTYPE if leaf.nbytes >= AUTO_BYTES else None
        if self.policy == "auto-fp16":  # document of Thalia: "FP16 for large tensors >1MB"
            return "float16" if leaf.nbytes > AUTO_BYTES else None
        return _DTYPES[self.policy]

    def check(self, state: FlatState, where: str, *, allow_optimizer: bool) -> None:
        where = f"{where}, precision {self.pattern!r}"
        if not self.matched and not (self.is_for_all and not state.leaves):
            paths = [leaf.path for leaf in state.leaves]
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
                "earlier patterns match every tensor of this one",
                where=where,
                hint="The first pattern that matches decides: put the narrower one first.",
            )
        # A pattern that also selects other tensors does not mean optimizer state, and skips it.
        if self.narrowable and not self.others and not allow_optimizer:
            raise InvalidInput(
                "optimizer state would lose precision",
                where=where,
                found=self.narrowable,
                hint=Hint.of(
                    "Training would continue differently, since small moments become zero.",
                    Hint(
                        "Pass allow_lossy_optimizer=True if that is what you want.",
                        "Give `--allow-lossy-optimizer` if that is what you want.",
                    ),
                ),
            )


def _check_tied(state: FlatState, chosen: Narrowing, where: str) -> None:
    """Refuse two types for tensors that share memory: they could not be loaded into it again."""
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
    """Return device, address and size of a tensor or array."""
    source = leaf.source
    if hasattr(source, "data_ptr"):
        return str(source.device), source.data_ptr(), leaf.nbytes
    if hasattr(source, "ctypes"):
        return "cpu", source.ctypes.data, leaf.nbytes
    return "its own", id(leaf), leaf.nbytes


def narrow_state(state: FlatState, narrowing: Narrowing) -> FlatState:
    """Return a state whose chosen leaves return rounded bytes.

    The numbers are checked here, and again when they are rounded: the program may change them
    meanwhile.
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
    """Yield path and stored element type of every tensor."""
    for part, chosen in zip(state.components, narrowing, strict=True):
        for number, leaf in enumerate(part.leaves):
            yield leaf.path, chosen.get(number, leaf.dtype)


def stored_view(memory: memoryview, dtype: str, original: str) -> memoryview:
    """Return the part of a tensor's memory into which its narrower elements must be read."""
    tail: memoryview = _rounding().tail(memory, dtype, original)
    return tail


def widen_all(tensors: Iterable[tuple[memoryview, str, str]], pool: Executor) -> None:
    """Widen tensors to their original element type in place; lost bits stay lost."""
    jobs = list(tensors)
    if jobs:
        list(pool.map(_rounding().widen, *zip(*jobs, strict=True)))


class _NarrowedLeaf(ArrayLeaf):
    """A tensor that is stored in a narrower type than its own."""

    __slots__ = ()

    def __init__(self, leaf: ArrayLeaf, dtype: str) -> None:
        nbytes = leaf.nbytes // ITEM_SIZES[leaf.dtype] * ITEM_SIZES[dtype]
        named = NarrowedDtype(dtype, leaf.dtype)
        opener = partial(_rounded, dtype=dtype)
        super().__init__(named, leaf.shape, nbytes, leaf, opener, leaf._link, is_ours=True)


def _rounded(leaf: ArrayLeaf, nbytes: int, dtype: str) -> memoryview:
    """Round a leaf part by part, and refuse numbers that the new type cannot hold."""
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
            expected=f"at most {_VANISHING_AT_MOST:.0%} of the nonzero numbers to become zero",
            found=f"{lost} of {nonzero}",
            hint=_instead_of(policy),
        )


def _refuse(leaf: ArrayLeaf, dtype: str, found: float) -> NoReturn:
    policy = _policy(dtype)
    raise UnsupportedValue(
        f"a number that {policy} cannot hold: it would become infinity",
        where=leaf.path,
        expected=f"at most {_LARGEST[dtype]} in magnitude",
        found=f"{found:g}",
        hint=_instead_of(policy),
    )


def _instead_of(policy: str) -> str:
    wider = ", or 'bf16', which has the range of float32" if policy == "fp16" else ""
    return f"Say 'keep' for this tensor{wider}."


def _policy(dtype: str) -> str:
    return next(name for name, made in _DTYPES.items() if made == dtype)


def _check_rule(pattern: object, policy: object, names: Sequence[str] = ()) -> None:
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
            expected=", ".join((*POLICIES, *names)),
            found=quoted(policy),
            hint=f"Did you mean {alias!r}?" if alias else near(str(policy), (*POLICIES, *names)),
        )


def _first_match(uses: Iterable[_Use], path: str) -> _Use | None:
    first = None
    for use in uses:
        # Later ones too: a pattern that never decides gets another error than one without a match.
        if (first is None or not use.matched) and fnmatchcase(path, use.pattern):
            use.matched = True
            first = first or use
    return first


def _rounding() -> ModuleType:
    # It imports numpy, which a program that only lists does not need.
    from holdfast.registry.spec.precision import rounding

    return rounding
