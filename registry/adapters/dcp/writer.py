"""`HoldfastWriter`: a save of DCP becomes a checkpoint of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.registry.adapters.dcp.reader import NoCheckpointId, complete, refuse_twins
from holdfast.registry.adapters.dcp.staged import KeptMemory, Staged, deadline_of
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.face import Registry, Run, StateOptions, shows_options
from holdfast.registry.history import WriterToken
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import ask
from holdfast.registry.saving.collective.torch_group import TorchGroup
from holdfast.registry.store import WorkerAddress

# A run as another process opens it: the process in which `async_save` may save.


#: The runs that this process has opened for others, by writer token.
_opened: dict[str, tuple[Run, int]] = {}
_LOGGER = logging.getLogger("holdfast")
_OURS = "Pass planner=holdfast.dcp.HoldfastSavePlanner()."
#: Methods by which a planner changes what is saved.
_CHANGING = ("set_up_planner", "lookup_object", "transform_object", "resolve_data")


@dataclass(frozen=True)
class Away:
    """A run, as it is sent to another process."""

    address: WorkerAddress
    run_id: str
    deadline_s: float | None  # the deadline of its group; `None` without a group
    token: WriterToken  # the writer token, under which both processes save

    @classmethod
    def of(cls, run: Run) -> Away:
        """Describe a run."""
        handle = run.handle
        if handle.journal is not None:
            raise _refusal(run, "its saves go to the journal of this process")
        try:
            address = WorkerAddress.of(run.handle.store, read_only=False)
        except InvalidInput as error:
            raise _refusal(run, error.summary) from error
        deadline_s = None if handle.ranks is None else handle.ranks.group.deadline_s
        return cls(address, run.id, deadline_s, handle.ownership.lend())

    def open(self) -> Run:
        """Open the run, or return the handle that this process has already."""
        run, resumes = _opened.get(self.token.token, (None, -1))
        if run is None:
            group = None if self.deadline_s is None else TorchGroup(deadline_s=self.deadline_s)
            run = Registry(self.address.opened()).run(self.run_id, group=group)
        if resumes != self.token.resumes:
            run.handle.ownership.borrow(self.token)
            _opened[self.token.token] = run, self.token.resumes
        return run


def _refusal(run: Run, found: str) -> InvalidInput:
    return InvalidInput(
        "another process cannot save into this run",
        where=run.id,
        found=found,
        hint="Save with async_checkpointer_type=AsyncCheckpointerType.THREAD.",
    )


class HoldfastWriter(NoCheckpointId, StorageWriter, AsyncStager):
    """Saves into a run with `torch.distributed.checkpoint`: `save` and `async_save`.

    ```python
    run = reg.run("my-run", create=True, group=TorchGroup())  # on every rank
    writer = HoldfastWriter(run, step=step)
    dcp.save(state, storage_writer=writer, planner=HoldfastSavePlanner(), use_collectives=False)
    ```

    The checkpoint is that of `run.save(state, step=step)`, with the same id, whatever the layout:
    one atomic commit for all ranks. `async_save` copies the state to memory that is kept for the
    next one, and saves it in a thread or in another process, under the same writer token.

    Args:
        run: The run. In a job of several ranks it was opened with a group, on every rank.
        step: Training step, update or epoch of the state: 0 to 2^53.
        phase: Phase of the run. Default: the phase that the run is in.
        metrics: Numbers that describe the state.
        meta: Plain values to store with the checkpoint; its id does not depend on them.
        tier: Retention class.
        storing: As for `Run.save`.
        allow_nonfinite: Let NaN and infinity in watched weights become latest.

    Attributes:
        checkpoint: The checkpoint, once it is saved by this process; else `None`. The `Metadata`
            that DCP returns has its ref and id in `storage_meta`.

    Raises:
        InvalidInput: An argument is wrong, or the job has several ranks and the run no group.
    """

    checkpoint: Checkpoint | None
    _synchronize_after_execute = False

    @shows_options(StateOptions)
    def __init__(self, run: Run, *, step: int, **options: Unpack[StateOptions]) -> None:
        self._check_group(run)
        self._run: Run | Away = run
        self._staged: Staged | None = None
        self.checkpoint = None
        self._request = ask(run.handle, step, takes_over=True, **options)

    @staticmethod
    def _check_group(run: Run) -> None:
        is_job = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_job and run.handle.ranks is None:
            raise InvalidInput(
                "all ranks save with torch.distributed.checkpoint, and the run has no group",
                where=run.id,
                hint="Open it on every rank with reg.run(..., "
                "group=holdfast.distributed.TorchGroup()).",
            )

    # As a stager of async_save

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy this rank's part of a state, once an earlier `async_save` of the run has ended.

        Returns:
            An empty dict: the writer holds the copy itself.

        Raises:
            Conflict: The earlier save has not ended within the deadline of the group.
        """
        run = self._here()
        memory = KeptMemory.of(run)
        held = memory.take(f"{run.id}: step {self._request.step}", deadline_of(run))
        self._staged = Staged.of(run, state_dict, self._request, memory)
        return held

    def synchronize_staging(self) -> None:
        """Do nothing: the state is copied when `stage` returns."""

    def close(self) -> None:
        """Do nothing: the memory is kept for the next save of the run."""

    # As a storage writer

    def storage_meta(self) -> StorageMeta:
        """Tell the planner who writes."""
        return HoldfastMeta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run is open."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: the ranks of a run plan for themselves."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks of the run's group save.

        Raises:
            InvalidInput: DCP saves with another number of ranks.
        """
        ranks = self._here().handle.ranks
        size = 1 if ranks is None else ranks.group.size
        if len(plans) not in (1, size):  # one plan if DCP uses no collectives
            raise InvalidInput(
                "not all ranks of the run's group save",
                where="process_group",
                expected=f"{size} ranks",
                found=len(plans),
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the state that was staged, or that the planner was given; commit it.

        Raises:
            RegistryError: The errors of `Run.save`.
        """
        handle = self._here().handle
        if self._staged is not None:
            self.checkpoint = self._staged.finish(handle)
        else:
            with handle.telling_ranks(self._request.step):
                state = state_of(planner)
                refuse_twins(state)
            self.checkpoint = handle.saver.pipeline.save(state, self._request)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let the result of the save describe the checkpoint, which is committed already."""
        assert self.checkpoint is not None
        complete(metadata, self.checkpoint)

    def _here(self) -> Run:
        if isinstance(self._run, Away):
            self._run = self._run.open()
        return self._run

    def __getstate__(self) -> dict[str, Any]:
        away = self._run if isinstance(self._run, Away) else Away.of(self._run)
        return {**vars(self), "_run": away, "checkpoint": None}


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the error of Holdfast that a `CheckpointException` of DCP has in it.

    DCP collects the errors of all ranks in one of its own, which is no `Exception`. Errors that are
    none of Holdfast's stay as they are.

    ```python
    with typed_errors():
        dcp.load(state, storage_reader=HoldfastReader(checkpoint))
    ```

    Raises:
        RegistryError: The error of the lowest rank that has one.
    """
    try:
        yield
    except CheckpointException as collected:
        for _, (error, _) in sorted(collected.failures.items()):
            if isinstance(error, RegistryError):
                raise error from collected
        raise


class HoldfastMeta(StorageMeta):
    """Tells a planner that a `HoldfastWriter` writes."""


class HoldfastSavePlanner(SavePlanner):
    """Keeps the nested state for `HoldfastWriter`, so that the id is that of `run.save`.

    It plans nothing: the ranks of a run plan for themselves, once for a layout. With another
    storage writer it is refused.

    Attributes:
        state_dict: The state of the running save.
    """

    state_dict: dict[str, Any]

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the state.

        Raises:
            InvalidInput: Another storage writer writes; it would write nothing.
        """
        if not isinstance(storage_meta, HoldfastMeta):
            raise InvalidInput(
                "this planner is for HoldfastWriter alone",
                where="planner",
                hint="Save with storage_writer=holdfast.dcp.HoldfastWriter(...), or without it.",
            )
        self.state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Return an empty plan."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans, and a description that the writer completes."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan, and change nothing."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> NoReturn:
        """Refuse: no plan of this planner has an item."""
        raise InvalidInput("this planner plans nothing", found=write_item.index.fqn)


def state_of(planner: SavePlanner) -> dict[str, Any]:
    """Return the state that a planner was given."""
    if isinstance(planner, HoldfastSavePlanner):
        return planner.state_dict
    if not isinstance(planner, DefaultSavePlanner) or _changes(planner):
        raise InvalidInput(
            "this planner changes the saved state, but a run saves the state itself",
            where="planner",
            found=type(planner).__qualname__,
            hint=f"{_OURS[:-1]}, and change the state before the save.",
        )
    if not planner.flatten_state_dict:
        return planner.state_dict
    if planner.is_coordinator:  # one rank of a job says it
        _LOGGER.warning(
            "torch's DefaultSavePlanner flattens a state: empty dicts are lost, integer keys "
            "become strings, and every dict a plain one; the id is the remaining state's. %s",
            _OURS,
        )
    nested: dict[str, Any] = unflatten_state_dict(planner.state_dict, planner.mappings)
    return nested


def _changes(planner: SavePlanner) -> bool:
    kind = type(planner)
    return any(getattr(kind, one) is not getattr(DefaultSavePlanner, one) for one in _CHANGING)
