"""What the ranks of a fleet do with torch.distributed.checkpoint."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from holdfast.dcp import HoldfastReader, HoldfastSavePlanner, HoldfastWriter, typed_errors
from holdfast.distributed import TorchGroup
from holdfast.registry.errors import RegistryError
from tests.registry.saving.collective.acts import DEADLINE_S, sharded, tensors
from tests.support.processes import servers


@contextmanager
def may_have_children() -> Iterator[None]:
    """Let a rank start the process that saves, as a real one may; it is forked from a warm one."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torchs = _async_process_executor.mp
    _async_process_executor.mp = SimpleNamespace(get_context=lambda _: servers())  # type: ignore[assignment]
    try:
        yield
    finally:
        if (saving := _async_process_executor._CHECKPOINT_PROCESS) is not None:
            saving._save_process.kill()
            saving._save_process.join()
            _async_process_executor._CHECKPOINT_PROCESS = None
        _async_process_executor.mp = torchs


def saved_each_way(rank: int, size: int, url: str, kind: str) -> list[str]:
    """Save a layout by `save` and both kinds of `async_save`; return the ids."""
    group, own = TorchGroup(deadline_s=DEADLINE_S), dist.new_group(backend="gloo")
    state = sharded(kind, size)
    with holdfast.open(url) as reg:
        run = reg.run(kind, create=True, group=group)
        found = [
            dcp.save(
                state, storage_writer=HoldfastWriter(run, step=1), planner=HoldfastSavePlanner()
            )
        ]
        for step in (2, 3):
            writer = HoldfastWriter(run, step=step, metrics={"loss": step})
            future: Any = dcp.async_save(state, storage_writer=writer, process_group=own)
            change(state)  # what is saved was copied
            found.append(future.result())
            change(state)
        return [str(one.storage_meta.save_id) for one in found]


def saved_by_processes(rank: int, size: int, url: str, kind: str) -> list[Any]:
    """Go back to a checkpoint, save twice in other processes and then here.

    Returns:
        The ids, the steps that the run has then, and the error of a state that one rank refuses.
    """
    state = sharded(kind, size)
    with may_have_children(), holdfast.open(url) as reg:
        run = reg.run("away", create=True, group=TorchGroup(deadline_s=DEADLINE_S))
        for step in (1, 2):
            run.save(state, step=step)
        run.restore_into({"model": state["model"]}, run.history.checkpoint(1), strict=False)
        found = [str(_in_process(run, state, step).storage_meta.save_id) for step in (5, 6)]
        found.append(run.save(state, step=7).digest.hex())
        said = ""
        try:
            _in_process(run, {**state, "n": object() if rank else 3}, 8)
        except RegistryError as error:
            said = f"{type(error).__name__} {getattr(error, 'rank', rank)}"
        run.refresh()
        return [*found, [one.step for one in run.checkpoints()], said]


def _in_process(run: holdfast.Run, state: dict[str, Any], step: int) -> Any:
    future: Any = dcp.async_save(
        state,
        storage_writer=HoldfastWriter(run, step=step),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        use_collectives=False,
    )
    return future.result()


def change(state: dict[str, Any]) -> None:
    """Change the weights in place; twice changes nothing."""
    with torch.no_grad():
        for one in state["model"].parameters():
            one.neg_()


def loaded(rank: int, size: int, url: str, ref: str, kind: str, together: bool) -> list[str]:
    """Load a checkpoint into a layout of other values; return the paths that are not right."""
    wanted, target = sharded(kind, size), sharded(kind, size, seed=1)
    target |= {"n": 0, "missing": 7}
    group = TorchGroup(deadline_s=DEADLINE_S) if together else None
    with holdfast.open(url) as reg, typed_errors():
        reader = HoldfastReader(reg.checkpoint(ref), group=group)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(target, storage_reader=reader, planner=planner)
    assert (target.pop("n"), target.pop("missing")) == (3, 7)
    right, found = tensors(wanted), tensors(target)
    return [path for path, one in right.items() if not torch.equal(one, found[path])]


def failed(
    rank: int, size: int, url: str, run_id: str, use_collectives: bool
) -> tuple[str, int, str]:
    """Save a state that one rank refuses, then a sound one.

    Returns:
        The class of the error, the rank that it names, and the id of the second save.
    """
    state = {**sharded("fsdp", size), "n": object() if rank else 3}
    with holdfast.open(url) as reg:
        run = reg.run(run_id, create=True, group=TorchGroup(deadline_s=DEADLINE_S))

        def save(state: dict[str, Any]) -> Any:
            return dcp.save(
                state,
                storage_writer=HoldfastWriter(run, step=1),
                planner=HoldfastSavePlanner(),
                use_collectives=use_collectives,
            )

        kind, named = "", -1
        try:
            with typed_errors():
                save(state)
        except RegistryError as error:
            kind, named = type(error).__name__, getattr(error, "rank", rank)
        assert not run.checkpoints()
        dist.barrier()  # the training's own group goes on
        return kind, named, save({**state, "n": 3}).storage_meta.save_id
