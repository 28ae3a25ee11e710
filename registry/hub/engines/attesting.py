"""Compare the weights that an engine has in memory with a checkpoint, by the engine's digests.

Each rank of an engine hashes its own tensors. The checkpoint's are read once, and hashed in the
forms that an engine makes without computing: fused, cut for ranks, filled up with rows of zeros.
What was cast, quantized or packed has other digests, and is compared with a baseline: the digests
of the engine after a verified load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Attestation
from holdfast.registry.formats import new_file
from holdfast.registry.hub.engines.telling import EngineTensor, digests_at, key_of
from holdfast.registry.hub.views import ViewOptions, check_weights, view_of
from holdfast.registry.loading import Chunks, Joined, Stored
from holdfast.registry.objects import TensorEntry
from holdfast.registry.values import Digest

#: The tensors that engines keep as one, by the part of its name that says so.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: The output layer of a model, which an engine does not have if it is tied to the embedding.
_TIED = "lm_head.weight"
_EMPTY = hashlib.sha256().hexdigest()
_KINDS = ("equal", "unchanged", "changed", "changed or other form", "other form", "missing")
_Weights = Mapping[str, tuple[TensorEntry, Chunks]]
_Given = Sequence[EngineTensor]
_Bytes = NDArray[np.uint8]


def attest(stored: Stored, url: str, key: Path | None, baseline: Path | None) -> Attestation:
    """Compare the weights in an engine with a checkpoint; names of an engine begin with a rank.

    `changed` and `unchanged` are since the baseline, which is written if it is not there. A tensor
    that an engine keeps elsewhere, or hashes by a function of its own, is of `other form`.
    """
    view = view_of(stored, ViewOptions(2**63, ()))
    check_weights(view)
    weights = {name: one for file in view.files.values() for name, one in _tensors(file)}
    engine, told, given = digests_at(url, key_of(key))
    before = {} if baseline is None else _baseline(baseline, stored.digest.hex(), told, given)
    found = _compare(weights, given, before)
    tensors = {kind: tuple(found[kind]) for kind in _KINDS if found.get(kind)}
    extra = (*found.get("extra", ()),)
    return Attestation(engine, stored.ref, stored.digest, tensors, uncompared=extra)


def _tensors(file: Joined) -> Iterator[tuple[str, tuple[TensorEntry, Chunks]]]:
    """Yield the tensors of a file of weights by the names that an engine finds in it."""
    tensors = [one for one in file.parts if isinstance(one, TensorEntry)]
    if tensors and isinstance(head := file.parts[0], bytes):
        names = [name for name in json.loads(head[8:]) if name != "__metadata__"]
        yield from zip(names, ((one, file.chunks) for one in tensors), strict=True)


def _baseline(path: Path, id_: str, told: str | None, given: _Given) -> Mapping[str, str]:
    """Return the digests of a baseline; write it if the engine was told of this version."""
    now = {one.key: one.digest for one in given}
    if not path.exists():
        if told != id_:
            what = "no baseline: the engine was not told of this checkpoint"
            raise InvalidInput(what, where=path, expected=id_, found=told)
        with new_file(path, 0) as file:
            file.write(json.dumps({"id": id_, "digests": now}).encode())
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        found = json.loads(path.read_bytes())
        if found["id"] == id_ and found["digests"].keys() == now.keys():
            return dict(found["digests"])
    raise InvalidInput("not a baseline of this checkpoint and engine", where=path)


def _compare(weights: _Weights, given: _Given, before: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the tensors of an engine, and those that it does not have, by how they compare."""
    found, used, by_name = dict[str, list[str]](), dict[str, Digest](), attrgetter("name")
    for name, some in groupby(sorted(given, key=by_name), by_name):
        names = _sources(name, weights)
        used.update((one, weights[one][0].content) for one in names)
        sources = [weights[one] for one in names]
        arrays = [_rows(*one) for one in sources]
        for one in some:
            forms = (np.concatenate([*map(np.ravel, form)]) for form in _forms(arrays, one))
            if any(hashlib.sha256(form.data).hexdigest().startswith(one.digest) for form in forms):
                kind = "equal"
            elif sources and _EMPTY.startswith(one.digest):
                kind = "other form"
            elif before:
                kind = "unchanged" if before[one.key] == one.digest else "changed"
            else:
                kind = "changed or other form" if sources else "extra"
            found.setdefault(kind, []).append(one.key)
    if "equal" not in found and len(given[0].digest) < len(_EMPTY):  # SGLang's own, on a GPU
        found.setdefault("other form", []).extend(found.pop("changed or other form", []))
    missing = [
        name
        for name in weights.keys() - used
        if not name.endswith(_TIED) or weights[name][0].content not in used.values()
    ]
    return {**found, "missing": sorted(missing)} if missing else found


def _sources(name: str, weights: _Weights) -> Sequence[str]:
    """Return the names of the tensors of which an engine makes one."""
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{one}.") for one in parts]
        if names[0] != name and weights.keys() >= set(names):
            return names
    return [name] if name in weights else []


def _rows(entry: TensorEntry, chunks: Chunks) -> _Bytes:
    """Read a tensor, as bytes by row."""
    data = np.frombuffer(Joined([entry], chunks).read(0, entry.nbytes), np.uint8)
    return data.reshape(entry.shape[0] if entry.shape and data.size else 1, -1)


def _forms(arrays: list[_Bytes], of: EngineTensor) -> Iterator[list[_Bytes]]:
    """Yield the forms in which a rank may have tensors: some rows, some columns, or all."""
    wholes = [arrays] if arrays else []
    if len(arrays) == 1 and (more := -len(arrays[0]) % 64):  # engines fill up a vocabulary so
        wholes.append([np.pad(arrays[0], ((0, more), (0, 0)))])
    for whole in wholes:
        for axis in (0, 1) if of.parts > 1 else ():
            if all(one.shape[axis] % of.parts == 0 for one in whole):
                yield [np.split(one, of.parts, axis)[of.part] for one in whole]
        yield whole
