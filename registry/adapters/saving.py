"""Save the steps of a foreign trainer, with the state that every rank needs to resume.

For trainers that shard a model: fill it in place, and take everything else from rank 0. Weights and
moments have the names and the form of unsharded ones, so their digests are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.face import Run, find_in_run, rng
from holdfast.registry.history import check_not_completed
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import is_array, rebuild, walk
from holdfast.registry.saving import PendingSave
from holdfast.registry.saving.collective import load_into
from holdfast.registry.saving.loop import Checkpointer
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


_LOGGER = logging.getLogger("holdfast")
OnSave = Callable[[Checkpoint], object]
Gather = Callable[[], dict[str, Any]]


class StepSaver:
    """Saves states of a run, each step once."""

    def __init__(
        self,
        run: Run,
        *,
        background: bool,
        on_save: OnSave | None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._run = run
        #: Step of the newest state that was saved or resumed from; `None` before any.
        self.step: int | None = None
        self._background = background
        self._on_save = on_save
        self._checkpointer = checkpointer
        group = None if run.handle.ranks is None else run.handle.ranks.group
        self._together = group is not None and group.size > 1
        self._tells = group is None or group.rank == 0
        self._seen = 0
        self._gather: Gather | None = None
        self._final: dict[str, Any] | None = None
        self._pending: list[PendingSave] = []
        self._newest: Checkpoint | None = None

    @property
    def stopped(self) -> bool:
        """Whether the checkpointer was asked to stop, and leaves that to the trainer."""
        return self._checkpointer is not None and self._checkpointer.stopped

    def begin(self) -> None:
        """Begin to train: refuse a run that is completed, whose first save may be hours away."""
        check_not_completed(self._run.refresh().manifest)

    def resume_at(self, step: int) -> None:
        """Continue after a step that is saved."""
        self.step = self._seen = step

    def save(
        self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float], meta: Any = None
    ) -> None:
        """Save the state of a step; an error of the save before is raised here."""
        self.settle()
        if self._background:
            saving = self._run.save_async(state, step=step, metrics=metrics, meta=meta)
            self._pending.append(saving)
        else:
            self._tell(self._run.save(state, step=step, metrics=metrics, meta=meta))
        self.step = step

    def end_step(
        self, step: int, gather: Gather, metrics: Mapping[str, float], *, due: bool, first: bool
    ) -> None:
        """End a step, on every rank; a second call for the same step only makes a due save."""
        if self._checkpointer is None:
            if due and step != self.step:
                state = gather()
                if self._together:
                    state, metrics = of_first_rank(state, metrics)
                if first or self._together:
                    self.save(state, step, metrics)
                self.step = step
            return
        if step <= self._seen:
            return
        self._seen, self._final = step, None
        try:
            saving = self._checkpointer.step(
                step, lambda: self._final or self._gathered(gather), metrics, converged=due
            )
        finally:
            if first and self.stopped:  # it has saved this step without telling
                self._tell_of_the_last(step)
        self._gather = gather
        if saving is not None:
            self._pending.append(saving)
        self._tell_of_finished(wait=False)

    def end(self) -> None:
        """End the training: wait for its saves, and keep the last state for the checkpointer.

        Its block may end, and save, when the trainer has been taken apart. Every rank keeps it:
        only rank 0 knows whether it is saved already.
        """
        if self._gather is not None:
            self._final, self._gather = self._gathered(self._gather), None
        self.settle()

    def _gathered(self, gather: Gather) -> Any:
        return of_first_rank(gather(), {})[0] if self._together else gather()

    def settle(self) -> Checkpoint | None:
        """Wait for the saves under way; return the newest checkpoint, if one was saved."""
        self._tell_of_finished(wait=True)
        return self._newest

    def _tell_of_finished(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            saving = self._pending.pop(0)
            saving.settle()  # not raised: that of a save that may fail, skipped or superseded
            if saving.outcome == "saved":
                self._tell(saving.wait())

    def _tell_of_the_last(self, step: int) -> None:
        self._tell_of_finished(wait=True)
        latest = self._run.latest()
        if latest is not None and latest.step == step and latest != self._newest:
            self._tell(latest)

    def _tell(self, checkpoint: Checkpoint) -> None:
        self._newest = checkpoint
        if self._on_save is not None and self._tells:
            self._on_save(checkpoint)


def checkpoint_of(run: Run, ref: str) -> Checkpoint:
    """Return the checkpoint of a run that a ref names."""
    name, _, rest = ref.partition("/")
    if name != run.id:
        raise InvalidInput(
            "a checkpoint of another run",
            where=quoted(ref),
            expected=f"{run.id}/...",
            hint="To continue it, open that run; to branch from it, `reg.fork(ref)`.",
        )
    handle = run.refresh().handle
    found = find_in_run(handle.store, handle.log, rest)
    if not isinstance(found, Checkpoint):
        raise InvalidInput("this is a stored state and no checkpoint", where=found.ref)
    return found


def capture_ranks(generators: Mapping[str, object] | None = None) -> list[dict[str, Any]]:
    """Return the random number generators of every rank; every rank must call this."""
    own = rng.capture(generators)
    if not torch.distributed.is_initialized():
        return [own]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def restore_rank(
    states: list[dict[str, Any]], generators: Mapping[str, object] | None = None
) -> None:
    """Set the generators of this rank, if as many ranks train as did when they were captured."""
    shared = torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if shared else 1
    if ranks != len(states):
        _LOGGER.warning(
            "the state has random generators of %d ranks, and %d train: they keep their seeds, "
            "so this resume is not bit for bit",
            len(states),
            ranks,
        )
        return
    state = states[torch.distributed.get_rank() if shared else 0]
    known = {name: one for name, one in (generators or {}).items() if rng.has(state, name)}
    rng.restore(state, known)  # of an older version a state has none of a loader's
