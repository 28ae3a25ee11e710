"""What every rank says before a save, and the comparison: one name has one value on all ranks."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry.collective.boxes import Boxes
from holdfast.registry.collective.shards import Layout, ShardLeaf, whole_shape
from holdfast.registry.collective.structure import Ints
from holdfast.registry.collective.talk import Message
from holdfast.registry.collective.wire import join
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.pytree import ArrayLeaf, FlatComponent, FlatState, component_path
from holdfast.registry.pytree.paths import segment
from holdfast.registry.training.save_request import SaveRequest
from holdfast.registry.values import canonical
from holdfast.registry.values.canonical import float_to_hex
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import item_size

_HINT = (
    "Give every rank the same value (rank 0's, by torch.distributed.broadcast), or wrap what each "
    "rank has for itself in holdfast.distributed.PerRank."
)
#: The arguments that all ranks must give alike, even where rank 0 decides about the others.
_OF_ALL = ("step", "companions")
_DICTS = {"d": None, "od": None, "sd": 0, "dd": 1}


@dataclass(frozen=True)
class RankPart:
    """One state of a save as this rank has it.

    Attributes:
        flat: Its components.
        layout: Its tensors and boxes.
        own: The values that the rank has for itself, as messages.
        checksums: Of each leaf, by its id: those that other ranks have too.
    """

    flat: FlatState
    layout: Layout
    own: tuple[bytes, ...]
    checksums: Mapping[int, int]

    @classmethod
    def of(cls, flat: FlatState, own: tuple[bytes, ...], pool: Executor | None) -> RankPart:
        """Describe a state; without a pool there are no other ranks, and nothing is compared."""
        leaves = [leaf for part in flat.components for leaf in part.leaves]
        shared = [one for one in leaves if not isinstance(one, ShardLeaf) or one.is_copied]
        sums = [] if pool is None else list(pool.map(_checksum, shared))
        return cls(flat, Layout(flat), own, dict(zip(map(id, shared), sums, strict=False)))

    def digest(self, part: FlatComponent) -> str:
        """Return the digest of what all ranks must have alike in a component."""
        return hashlib.sha256(canonical.encode(self.description(part))).hexdigest()

    def description(self, part: FlatComponent) -> Any:
        """Return what all ranks must have alike in a component, as JSON."""
        return [part.skeleton, [self._form(leaf) for leaf in part.leaves]]

    def _form(self, leaf: ArrayLeaf) -> list[Any]:
        is_sharded = isinstance(leaf, ShardLeaf)
        known = None if is_sharded else self.checksums.get(id(leaf))
        return [str(leaf.dtype), list(whole_shape(leaf)), is_sharded, known]

    @property
    def copies(self) -> Ints:
        """Tensor, offset, extent and checksum of each box that other ranks have too."""
        layout = self.layout
        by_number = {int(row[0]): row for row in layout.rows}
        rows = [
            [*by_number[number], self.checksums[id(leaf)]]
            for number, leaf in enumerate(layout.leaves)
            if isinstance(leaf, ShardLeaf) and id(leaf) in self.checksums
        ]
        return np.array(rows, np.int64).reshape(-1, layout.rows.shape[1] + 1)

    @property
    def small(self) -> list[Any]:
        """The parts of sharded tensors that are too small to be cut."""
        return [
            [leaf.offset, leaf.shape, base64.b64encode(leaf.buffer()).decode()]
            for leaf in self.layout.inline
        ]


def _checksum(leaf: ArrayLeaf) -> int:
    # It finds copies that have come apart; what is stored is verified by SHA-256.
    return zlib.crc32(leaf.buffer())


def layout_digest(layout: Layout) -> str:
    """Return the digest of a rank's layout."""
    return hashlib.sha256(layout.structure.digest + layout.rows.tobytes()).hexdigest()


def greeting(
    request: SaveRequest, parts: Mapping[str, RankPart], plans: Mapping[str, str]
) -> bytes:
    """Return what a rank says first.

    Args:
        request: The arguments of the save.
        parts: The states by the name of the companion; the state itself has none.
        plans: The digest of the layouts of all ranks for which this rank has its part of a plan.
    """
    states = {
        name: {
            "kind": part.flat.kind,
            "components": [[one.name, part.digest(one)] for one in part.flat.components],
            "layout": layout_digest(part.layout),
            "plan": plans.get(name, ""),
            "small": part.small,
            "own": len(part.own),
        }
        for name, part in parts.items()
    }
    columns: list[bytes] = []
    for part in parts.values():
        columns += [part.copies.tobytes(), *part.own]
    said = {"request": _fields(request), "decides": request.first_rank_decides, "states": states}
    return join({"step": request.step, **said}, *columns)


def explanation(parts: Mapping[str, RankPart], name: str, component: str) -> bytes:
    """Return what a rank has in a component, or its components, for `difference`."""
    part = parts[name]
    value: Any = [part.flat.kind, *(one.name for one in part.flat.components)]
    if component:
        [found] = [one for one in part.flat.components if one.name == component]
        value = part.description(found)
    return join({"value": value})


def layout_of(parts: Mapping[str, RankPart], name: str) -> bytes:
    """Return the layout of a state as a message."""
    layout = parts[name].layout
    return join({}, *Boxes.from_rows(layout.rows, len(layout.leaves)).encode())


def _fields(request: SaveRequest) -> dict[str, Any]:
    streams = {
        name: hashlib.sha256(repr(list(entries)).encode()).hexdigest()
        for name, entries in request.streams.items()
    }
    return {
        "step": request.step,
        "phase": request.phase,
        "tier": request.tier,
        **{f"metrics[{n!r}]": float_to_hex(v) for n, v in sorted(request.metrics.items())},
        "meta": canonical.encode(request.meta).decode(),
        **{f"streams[{name!r}]": digest for name, digest in sorted(streams.items())},
        "companions": sorted(request.companions),
        "compression": request.compression,
        "allow_nonfinite": request.allow_nonfinite,
    }


def check_requests(greetings: Sequence[Message], where: str) -> None:
    """Refuse ranks that save something else than rank 0.

    Where rank 0 decides, for itself, why it saves and with which metrics, only step and companions
    are compared.

    Raises:
        IncompatibleState: An argument differs.
    """
    first, decides = greetings[0][0]["request"], greetings[0][0]["decides"]
    for rank, (header, _) in enumerate(greetings):
        for name in _OF_ALL if decides else dict.fromkeys([*first, *header["request"]]):
            mine, theirs = first.get(name), header["request"].get(name)
            if mine != theirs:
                raise IncompatibleState(
                    f"the ranks save with different arguments: {name}",
                    where=f"{where}, rank {rank}",
                    expected=f"{mine}, as on rank 0",
                    found=theirs,
                    hint="Give every rank the same arguments; reduce metrics over the ranks first.",
                )


def differing(greetings: Sequence[Message]) -> tuple[str, str] | None:
    """Return the state and component of which the ranks have different values; `None` if none."""
    first = greetings[0][0]["states"]
    for header, _ in greetings:
        for name, state in header["states"].items():
            mine = [state["kind"], [one[0] for one in state["components"]]]
            if mine != [first[name]["kind"], [one[0] for one in first[name]["components"]]]:
                return name, ""
            for here, there in zip(first[name]["components"], state["components"], strict=True):
                if here != there:
                    return name, str(here[0])
    return None


def difference(
    where: str, component: str, descriptions: Sequence[Any], paths: Sequence[str]
) -> IncompatibleState:
    """Return the error for values that differ: it names the first of them.

    Args:
        where: The save.
        component: The component; empty if the ranks have different components.
        descriptions: What each rank has: `RankPart.description`, or its components.
        paths: The paths of the tensors of the component, on rank 0.
    """
    first = descriptions[0]
    rank = next(number for number, one in enumerate(descriptions) if not _same(one, first))
    other = descriptions[rank]
    if not component:
        return IncompatibleState(
            "the ranks have different components",
            where=f"{where}, rank {rank}",
            expected=f"{', '.join(map(str, first))}, as on rank 0",
            found=", ".join(map(str, other)),
            hint="Give every rank a state with the same keys.",
        )
    path = _unequal(component_path(component), first[0], other[0])
    if path is None:
        at = next((n for n, one in enumerate(first[1]) if [*other[1], None][n] != one), 0)
        path = paths[at]
    return IncompatibleState(
        "the ranks have different values under one name",
        where=f"{where}, rank {rank}: {path}",
        expected="the value of rank 0",
        found="another one",
        hint=_HINT,
    )


def _unequal(path: str, here: Any, there: Any) -> str | None:
    """Return the first path at which two skeletons differ; `None` if they are the same."""
    if _same(here, there):
        return None
    mine, theirs = _pairs(here) or [], _pairs(there) or []
    if _same([key for key, _ in mine], [key for key, _ in theirs]):
        for (key, one), (_, other) in zip(mine, theirs, strict=True):
            step = segment(key) if type(key) in (str, int) else canonical.encode(key).decode()
            found = _unequal(f"{path}/{step}", one, other)
            if found is not None:
                return found
    return path  # another kind of value, other keys, or another kind of dict


def _same(here: Any, there: Any) -> bool:
    # By the bytes: to Python 1 and true are equal.
    return canonical.encode(here) == canonical.encode(there)


def _pairs(node: Any) -> list[Any] | None:
    if type(node) is list:
        return [[number, item] for number, item in enumerate(node)]
    if type(node) is not dict or len(node) != 1:
        return None
    [(tag, payload)] = node.items()
    if tag not in _DICTS:
        return _pairs(payload) if tag == "tu" else None
    at = _DICTS[tag]
    found: list[Any] = payload if at is None else payload[at]
    return found


def check_copies(tables: Sequence[Ints], leaves: Sequence[ArrayLeaf], where: str) -> None:
    """Refuse copies of a part that differ.

    Args:
        tables: `RankPart.copies` of each rank.
        leaves: The tensors that are cut into chunks, on rank 0.
        where: The save.

    Raises:
        IncompatibleState: Two ranks have different bytes for one part.
    """
    rows = np.concatenate(tables)
    if not len(rows):
        return
    ranks = np.repeat(np.arange(len(tables)), [len(one) for one in tables])
    order = np.lexsort([ranks, *rows[:, :-1].T[::-1]])
    rows, ranks = rows[order], ranks[order]
    same_box = (rows[1:, :-1] == rows[:-1, :-1]).all(axis=1)
    wrong = np.flatnonzero(same_box & (rows[1:, -1] != rows[:-1, -1]))
    if len(wrong):
        at = int(wrong[0])
        raise IncompatibleState(
            "two ranks have different values of one part of a tensor",
            where=f"{where}, ranks {ranks[at]} and {ranks[at + 1]}: "
            f"{leaves[int(rows[at, 0])].path}",
            hint="The replicas of this tensor have come apart: synchronize them before the save.",
        )


def join_small(leaf: ArrayLeaf, parts: Sequence[Any], where: str) -> bytes:
    """Return the bytes of a sharded tensor that is too small to be cut.

    Raises:
        IncompatibleState: The parts do not make it whole, or copies differ.
    """
    shape, item = whole_shape(leaf), item_size(leaf.dtype)
    data = np.zeros((*shape, item), np.uint8)
    known = np.zeros(shape, bool)
    for offset, extent, text in parts:
        piece = np.frombuffer(base64.b64decode(text), np.uint8).reshape(*extent, item)
        at = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
        if known[at].any() and not np.array_equal(data[at], piece):
            raise IncompatibleState(
                "two ranks have different values of one part of a tensor",
                where=f"{where}: {leaf.path}",
            )
        data[at], known[at] = piece, True
    if not known.all():
        raise IncompatibleState(
            "the ranks' parts of a tensor overlap or leave gaps", where=f"{where}: {leaf.path}"
        )
    return data.tobytes()


def plan_key(layouts: Sequence[str]) -> str:
    """Return the digest of the layouts of all ranks."""
    return Digest.of("\n".join(layouts).encode()).hex()
