"""Which checkpoint's bytes a file has: compared by digests, without any data of the registry.

The components of the file are those that a push of it would store. Each is compared with the
component of the state with which it has the most in common: a file of safetensors calls its tensors
`model`, whatever they were pulled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.registry import pytree
from holdfast.registry.errors import NotFound, RegistryError, StoreUnavailable
from holdfast.registry.face.registry_handle import RegistryHandle
from holdfast.registry.history import RunLog, plain_values
from holdfast.registry.loading import CheckpointHandle, StateHandle
from holdfast.registry.objects import Component, Manifest, TensorEntry
from holdfast.registry.values import Digest, Json, canonical

#: Components of a file beside its tensors, which the registry need not have.
_BESIDE: Final = ("files", "json", "metadata")
#: Runs that are opened together; of these the newest comes first.
_AT_ONCE: Final = 256
#: Stands for a value that is not there: no value is encoded so.
_ABSENT: Final[Json] = {}
#: How a tensor compares that has the bytes of the state; `unchanged` is since a verified load.
_PROVEN: Final = {"equal", "unchanged"}
_SPARSE: Final = {"coo", "csr", "csc", "bsr", "bsc"}
#: The tensors and plain values of a component by their path in it.
_Items = Mapping[str, TensorEntry | Json]


@dataclass(frozen=True, slots=True)
class Attestation:
    """Which checkpoint's bytes a file has.

    Attributes:
        format: The format of the file; of weights in memory the engine, `sglang` or `vllm`.
        ref: The state that it was compared with: the named one, else the first that matches as a
            whole, else the one with the most equal bytes; `None` if none has any.
        id: The id of that state.
        tensors: Paths of tensors by how they compare: `equal`, `changed`, `other form` (other
            element type or shape, so other chunks: not comparable), `extra` (not in the registry),
            `missing` (not in the file); of an engine `changed or other form`, where a digest cannot
            tell, and `unchanged` since the baseline.
        values: Paths of plain values that differ.
        uncompared: Paths of values and files that were not compared: the other side has no such
            component, or the format keeps tensors alone; and of sparse tensors, whose parts were.
        absent: Components of the state that are not in the file.
        equal_bytes: Bytes of the equal tensors.
        looked_at: Number of states that it was compared with.
        left: Number of states, in the runs that were opened, that it was not compared with.
        unopened: Number of runs that were not opened.
        unread: The reasons for which runs and states could not be read, by name.
    """

    format: str
    ref: str | None = None
    id: Digest | None = None
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    equal_bytes: int = 0
    looked_at: int = 1
    left: int = 0
    unopened: int = 0
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the file, and of the components that it has, is the same."""
        return bool(self.tensors) and not (self.tensors.keys() - _PROVEN or self.values)


def attest(
    handle: RegistryHandle, file: tuple[str, Mapping[str, Component]], most: int
) -> Attestation:
    """Compare a digested file with the states of the runs, until one matches as a whole."""
    best, looked_at, left, opened = Attestation(file[0]), 0, 0, 0
    ids = {Manifest(kind, file[1]).digest for kind in ("dict", "odict")}
    names, unread = sorted(handle.run_names(), reverse=True), dict[str, str]()
    while opened < len(names) and not best.is_whole and looked_at < most:
        some = names[opened : opened + _AT_ONCE]
        opened += len(some)
        states = sorted(_states(handle, some, unread), key=lambda one: one.digest not in ids)
        for left in range(len(states), 0, -1):
            if best.is_whole or looked_at >= most:
                break
            state, looked_at = states[-left], looked_at + 1
            try:
                one = compare(state, file)
            except StoreUnavailable:
                raise
            except RegistryError as error:
                unread[state.ref] = error.summary
                continue
            best = one if one.is_whole or one.equal_bytes > best.equal_bytes else best
        else:
            left = 0
    unopened = len(names) - opened
    return replace(best, looked_at=looked_at, left=left, unopened=unopened, unread=unread)


def _states(handle: RegistryHandle, names: list[str], unread: dict[str, str]) -> list[StateHandle]:
    """Return the states of runs, each once: those of the newest run first."""

    def read(name: str) -> RunLog | RegistryError:
        try:
            return handle.open_log(name)
        except RegistryError as error:
            return error

    logs = []
    for name, log in zip(names, handle.store.pools.bulk.map(read, names), strict=True):
        if isinstance(log, StoreUnavailable):
            raise log  # the other runs would fail in the same way
        if isinstance(log, RunLog):
            logs += [log] if log.run.dropped is None else []
        elif not isinstance(log, NotFound):
            unread[name] = log.summary
    logs.sort(key=lambda log: max((one.time_ms for one in log.run.live()), default=0), reverse=True)
    found: dict[Digest, StateHandle] = {}
    for log in logs:
        for state in _states_of(handle, log):
            found.setdefault(state.digest, state)
    return list(found.values())


def _states_of(handle: RegistryHandle, log: RunLog) -> Iterator[StateHandle]:
    store, run = handle.store, log.run
    for record in reversed(run.checkpoints):
        if record.evicted is None:
            yield CheckpointHandle(store, log, record)
    for pin in reversed([*run.pins_of("artifact"), *run.pins_of("release")]):
        yield StateHandle(store, log, pin.manifest, pin.ref)
    for entry in reversed(run.roster()):
        yield StateHandle(store, log, entry.manifest, f"pool/v{entry.version:04d}")


def compare(state: StateHandle, file: tuple[str, Mapping[str, Component]]) -> Attestation:
    """Compare the components of a digested file with a state."""
    stored, parts = _items(state.manifest.components), _items(file[1])
    names, found, equal_bytes = _counterparts(parts, stored), dict[str, list[str]](), 0
    for name, mine in parts.items():
        other = names.get(name, name)
        theirs = stored[other] if name in names else {}
        prefix = f"{pytree.component_path(other)}/" if other else ""
        has_values = not all(isinstance(one, TensorEntry) for one in mine.values())
        for path in {**theirs, **mine}:
            kind = _kind(theirs.get(path, _ABSENT), mine.get(path, _ABSENT))
            is_kept = name in names and (has_values or path in mine)
            if (kind == "values" and not is_kept) or (name in _BESIDE and name not in names):
                kind = "uncompared"
            found.setdefault(kind, []).append(f"{prefix}{path}".removesuffix("/"))
            if kind == "equal" and isinstance(one := mine[path], TensorEntry):
                equal_bytes += one.nbytes
    kinds = ("equal", "changed", "other form", "extra", "missing")
    return Attestation(
        file[0],
        state.ref,
        state.digest,
        {kind: tuple(found[kind]) for kind in kinds if kind in found},
        tuple(found.get("values", ())),
        tuple(found.get("uncompared", ())),
        tuple(name or "bare tensors" for name in stored if name not in names.values()),
        equal_bytes,
    )


def _kind(stored: TensorEntry | Json, mine: TensorEntry | Json) -> str:
    """Return how a tensor or value of the file compares."""
    if isinstance(stored, TensorEntry) and isinstance(mine, TensorEntry):
        if stored.content == mine.content:
            return "equal"
        is_same_form = (stored.dtype, stored.shape) == (mine.dtype, mine.shape)
        return "changed" if is_same_form else "other form"
    if isinstance(stored, TensorEntry):
        return "missing"
    if isinstance(mine, TensorEntry):
        return "extra"
    if isinstance(stored, dict) and _SPARSE & stored.keys():
        return "uncompared"
    return "same value" if canonical.encode(stored) == canonical.encode(mine) else "values"


def _items(parts: Mapping[str, Component]) -> dict[str, _Items]:
    """Return the items of components; bare tensors are one, as in a file of safetensors."""
    found: dict[str, _Items] = {}
    bare: dict[str, TensorEntry | Json] = {}
    for name, part in parts.items():
        if isinstance(part.skeleton, dict) and not {"t", "n", "nt"}.isdisjoint(part.skeleton):
            found[""] = bare = {**bare, name: part.tensors[0]}
            continue
        items: dict[str, TensorEntry | Json] = {**plain_values({name: part})}
        for index, path in pytree.leaf_paths(name, part.skeleton).items():
            items[path] = part.tensors[index]
        start = len(pytree.component_path(name)) + 1
        found[name] = {path[start:]: one for path, one in items.items()}
    return found


def _counterparts(parts: Mapping[str, _Items], stored: Mapping[str, _Items]) -> dict[str, str]:
    """Return the component of the state for those of a file that have one."""
    ranked = []
    for name, mine in parts.items():
        for other, theirs in stored.items():
            shared = (mine.keys() & theirs.keys()) - {""}  # the path of a component that is a value
            equal = sum(
                _kind(theirs[path], mine[path]) in ("equal", "same value") for path in shared
            )
            if shared or name == other:
                ranked.append((equal, name == other, len(shared), name, other))
    found: dict[str, str] = {}
    for *_, name, other in sorted(ranked, reverse=True):
        if name not in found and other not in found.values():
            found[name] = other
    return found
