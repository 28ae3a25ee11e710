"""Each rank's share of a save, its messages before the save, and the check that they agree."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.pytree import (
    ArrayLeaf,
    FlatComponent,
    FlatState,
    component_path,
    pairs_of,
    segment,
)
from holdfast.registry.saving.collective.shards import Boxes, Ints, Layout, ShardLeaf, whole_shape
from holdfast.registry.saving.collective.talk import Message, join
from holdfast.registry.saving.save_request import SaveRequest
from holdfast.registry.values import canonical, float_to_hex, item_size

_HINT = (
    "Give every rank the same value (rank 0's, by torch.distributed.broadcast), or wrap what each "
    "rank has for itself in holdfast.distributed.PerRank."
)
#: Arguments that must be equal on all ranks, even if rank 0 decides the other ones.
_OF_ALL = ("step", "companions")


@dataclass(frozen=True)
class Share:
    """This rank's share of one state of a save."""

    flat: FlatState  # its components
    layout: Layout  # its tensors and boxes
    own: tuple[bytes, ...]  # the rank's `PerRank` values, as messages
    checksums: Mapping[int, int]  # by id of the leaf; only leaves that other ranks have too

    @classmethod
    def of(cls, flat: FlatState, own: tuple[bytes, ...], pool: Executor | None) -> Share:
        """Describe a state; without a pool there are no other ranks, and nothing is compared."""
        shared = [one for one in flat.leaves if not isinstance(one, ShardLeaf) or one.is_copied]
        # They find replicas that differ; stored bytes are verified by SHA-256.
        sums = [] if pool is None else pool.map(lambda leaf: zlib.crc32(leaf.buffer()), shared)
        return cls(flat, Layout(flat), own, dict(zip(map(id, shared), sums, strict=False)))

    def digest(self, component: FlatComponent) -> str:
        """Return the digest of the parts of a component that must be equal on all ranks."""
        return hashlib.sha256(canonical.encode(self.description(component))).hexdigest()

    def description(self, component: FlatComponent) -> Any:
        """Return the parts of a component that must be equal on all ranks, as JSON."""
        return [component.skeleton, [self._form(leaf) for leaf in component.leaves]]

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


def layout_digest(layout: Layout) -> str:
    """Return the digest of a rank's tensors and boxes."""
    return hashlib.sha256(layout.structure.digest + layout.rows.tobytes()).hexdigest()


def greeting(request: SaveRequest, shares: Mapping[str, Share], plans: Mapping[str, str]) -> bytes:
    """Return the first message of a rank: its arguments and a digest of each component."""
    states = {
        name: {
            "kind": share.flat.kind,
            "components": [[one.name, share.digest(one)] for one in share.flat.components],
            "layout": layout_digest(share.layout),
            "plan": plans.get(name, ""),
            "small": share.small,
            "own": len(share.own),
        }
        for name, share in shares.items()
    }
    columns: list[bytes] = []
    for share in shares.values():
        columns += [share.copies.tobytes(), *share.own]
    said = {"request": _fields(request), "decides": request.first_rank_decides, "states": states}
    return join({"step": request.step, **said}, *columns)


def explanation(shares: Mapping[str, Share], name: str, component: str) -> bytes:
    """Return a rank's description of one component, or of all, for `difference`."""
    share = shares[name]
    value: Any = [share.flat.kind, *(one.name for one in share.flat.components)]
    if component:
        [found] = [one for one in share.flat.components if one.name == component]
        value = share.description(found)
    return join({"value": value})


def layout_of(shares: Mapping[str, Share], name: str) -> bytes:
    """Return a rank's boxes of a state as a message."""
    layout = shares[name].layout
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
        "compression": request.storing.compression,
        "allow_nonfinite": request.allow_nonfinite,
    }


def check_requests(greetings: Sequence[Message], where: str) -> None:
    """Refuse ranks whose arguments differ from rank 0's.

    If rank 0 decides when to save and with which metrics, only step and companions are compared.
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
    """Return the first state and component whose values differ between ranks; `None` if none."""
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
    """Return the error for values that differ: it names the first of them."""
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
    mine, theirs = _items(here), _items(there)
    if _same([key for key, _ in mine], [key for key, _ in theirs]):
        for (key, one), (_, other) in zip(mine, theirs, strict=True):
            step = segment(key) if type(key) in (str, int) else canonical.encode(key).decode()
            found = _unequal(f"{path}/{step}", one, other)
            if found is not None:
                return found
    return path  # another kind of value, other keys, or another kind of dict


def _same(here: Any, there: Any) -> bool:
    # Compare bytes: in Python 1 == True.
    return canonical.encode(here) == canonical.encode(there)


def _items(node: Any) -> list[Any]:
    """Return the keys and items of a dict, list or tuple; none of another value."""
    if type(node) is dict and "tu" in node:
        node = node["tu"]
    return [*enumerate(node)] if type(node) is list else pairs_of(node) or []


def check_copies(tables: Sequence[Ints], leaves: Sequence[ArrayLeaf], where: str) -> None:
    """Refuse copies of a part that differ."""
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


def join_small(leaf: ArrayLeaf, boxes: Sequence[Any], where: str) -> bytes:
    """Return the bytes of a sharded tensor that is too small to be cut."""
    shape, item = whole_shape(leaf), item_size(leaf.dtype)
    data = np.zeros((*shape, item), np.uint8)
    known = np.zeros(shape, bool)
    for offset, extent, text in boxes:
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
