"""For trainers that shard a model: fill it in place, and take everything else from rank 0.

Weights and moments have the names and the form of unsharded ones, so their digests are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.face import Run
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import is_array, rebuild, walk
from holdfast.registry.saving.collective import load_into
from holdfast.registry.values import abridged

WEIGHTS = ("model", "adapter")
#: Components that may be split over the ranks; rank 0 has all others.
SHARDED = (*WEIGHTS, "optimizer")


def check_group(run: Run, where: str, found: str) -> None:
    """Refuse a trainer that shards a model with a run whose ranks do not save together."""
    if run.handle.ranks is None:
        raise InvalidInput(
            "this trainer shards the model, and the ranks of the run do not save together",
            where=where,
            expected="registry.run(..., group=holdfast.distributed.TorchGroup())",
            found=found,
            hint="Call torch.distributed.init_process_group() first; torchrun starts the ranks.",
        )


def of_first_rank(state: Mapping[str, Any], metrics: Mapping[str, float]) -> tuple[Any, Any]:
    """Return a state and metrics in which all is rank 0's but the sharded parts; all ranks call it.

    Clocks, counters of callbacks and metrics of a rank's own batches differ from rank to rank.
    """
    said: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        rest = {
            name: rebuild(name, part, _on_host)
            for name, part in state.items()
            if name not in SHARDED and not any(_is_shard(leaf) for _, leaf in walk(name, part))
        }
        said = [(list(state), rest, dict(metrics))]
    torch.distributed.broadcast_object_list(said, src=0)
    names, rest, metrics = said[0]
    return {name: rest[name] if name in rest else state[name] for name in names}, metrics


def _on_host(_: str, leaf: Any) -> Any:
    """Return the tensor on the CPU; otherwise every rank would load it onto rank 0's device."""
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _is_shard(leaf: Any) -> bool:
    return hasattr(leaf, "device_mesh") or hasattr(leaf, "local_shards")


def prepare_moments(model: Any, optimizer: Any) -> None:
    """Let an optimizer make its moments, which it does not have before its first step."""
    get_optimizer_state_dict(model, optimizer)


def load_around(
    run: Run, found: Checkpoint, target: Mapping[str, Any], *, trains: bool, strict: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into the tensors of a sharded model; all ranks call it.

    Memory stays bounded: only what the target does not have is loaded by every rank.
    """
    for name in set(WEIGHTS) & target.keys() if strict else ():
        _check_weights(found, name, target[name])
    if trains:
        run.restore_into(target, found, strict=False)
    else:
        ranks = run.handle.ranks
        assert ranks is not None  # `check_group` refuses a run without
        load_into(found, target, group=ranks.group, strict=False)
    kept = found.handle.commit_keys()
    names = found.components if kept is None else kept.order
    rest = [name for name in names if name not in target and name not in SHARDED]
    state: dict[str, Any] = found.load(only=rest, precision="original")
    parts = {name: part for name, part in target.items() if name in found.components}
    return {**state, **{name: _filled(found, name, part) for name, part in parts.items()}}


def _check_weights(found: Checkpoint, name: str, part: Any) -> None:
    begin = f"{pytree.component_path(name)}/"
    have = {path for path in found.tensors() if path.startswith(begin)}
    want = {path for path, leaf in walk(name, part) if is_array(leaf)}
    if have != want:
        raise IncompatibleState(
            "the checkpoint has the weights of another model",
            where=found.ref,
            found=abridged(
                [
                    f"{path} is not in the {'model' if path in have else 'checkpoint'}"
                    for path in sorted(have ^ want)
                ]
            ),
            hint="Nothing was changed. Give the trainer the model that was saved.",
        )


def _filled(found: Checkpoint, name: str, part: Any) -> Any:
    """Return a component with the filled tensors of a target, and its own plain values."""
    manifest, tensors = found.manifest, dict(walk(name, part))
    component = manifest.components[name]
    paths = pytree.leaf_paths(name, component.skeleton)
    kinds = pytree.leaf_kinds(component.skeleton)
    arrays, missing = [], []
    for index, entry in enumerate(component.tensors):
        array = tensors.get(paths[index])
        if not is_array(array):
            array, memory = pytree.allocate(entry.dtype, entry.shape, kinds[index])
            missing.append((entry, memory))
        arrays.append(array)
    found.handle.reader.read(manifest, missing)
    return pytree.unflatten_component(component.skeleton, arrays, name=name)
