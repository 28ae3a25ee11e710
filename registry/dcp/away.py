"""A run as another process opens it: the process in which `async_save` may save."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.collective.torch_group import TorchGroup
from holdfast.registry.collective.trainer import CollectiveTrainer
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history.writer_token import WriterToken
from holdfast.registry.registries.registry import Registry
from holdfast.registry.runs.resuming import trainer_of
from holdfast.registry.runs.run import Run
from holdfast.registry.runs.view import committer_of
from holdfast.registry.storage.worker_address import WorkerAddress

#: The runs that this process has opened for others, by writer token.
_opened: dict[str, tuple[Run, int]] = {}


@dataclass(frozen=True)
class Away:
    """A run, as it is sent to another process.

    Attributes:
        address: Its registry.
        run_id: The run.
        deadline_s: That of its group; `None` if it has none.
        token: The writer token, under which both processes save.
    """

    address: WorkerAddress
    run_id: str
    deadline_s: float | None
    token: WriterToken

    @classmethod
    def of(cls, run: Run) -> Away:
        """Describe a run.

        Raises:
            InvalidInput: Another process cannot open it, or it has a journal.
        """
        trainer = trainer_of(run)
        if trainer.backlog() is not None:
            raise _refusal(run, "its saves go to the journal of this process")
        try:
            address = WorkerAddress.of(committer_of(run).store, read_only=False)
        except InvalidInput as error:
            raise _refusal(run, error.summary) from error
        group = trainer.group if isinstance(trainer, CollectiveTrainer) else None
        deadline_s = None if group is None else group.deadline_s
        return cls(address, run.id, deadline_s, trainer.lend())

    def open(self) -> Run:
        """Open the run, or return the handle that this process has already."""
        run, resumes = _opened.get(self.token.token, (None, -1))
        if run is None:
            group = None if self.deadline_s is None else TorchGroup(deadline_s=self.deadline_s)
            run = Registry(self.address.opened()).run(self.run_id, group=group)
        if resumes != self.token.resumes:
            trainer_of(run).borrow(self.token)
            _opened[self.token.token] = run, self.token.resumes
        return run


def _refusal(run: Run, found: str) -> InvalidInput:
    return InvalidInput(
        "another process cannot save into this run",
        where=run.id,
        found=found,
        hint="Save with async_checkpointer_type=AsyncCheckpointerType.THREAD.",
    )
