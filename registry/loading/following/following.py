"""Follow a run with a model: load its newest weights in place, and read only changed chunks.

This module chooses the checkpoint; `swapping` replaces the weights, and `watching` waits. Nothing
is written to the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Self

from holdfast.registry.errors import IncompatibleState, MissingObject, NotFound
from holdfast.registry.history import check_phase
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.following.swapping import Exchange, SwappedModel
from holdfast.registry.loading.following.watching import OVER, Patience
from holdfast.registry.spec import check_phase_is_declared
from holdfast.registry.writing import Committer


@dataclass(frozen=True, slots=True)
class _Ready:
    """A checkpoint with all chunks that the model lacks."""

    checkpoint: Checkpoint
    n: int
    exchange: Exchange


class Following(Iterator[Checkpoint]):
    """The checkpoints of a run, each with its weights in a model; `RunFollow.into` explains it.

    Attributes:
        current: The checkpoint whose weights the model has; `None` before the first.
        moved_bytes: Stored bytes of chunks that were read from the store for it.
    """

    def __init__(
        self,
        committer: Committer,
        model: object,
        *,
        component: str | None,
        phase: int | str | None,
        strict: bool,
        latest_only: bool,
        rehash: bool | None,
        patience: Patience,
        follow: bool,
    ) -> None:
        self._store = committer.store
        self._log = committer.log
        self._model = SwappedModel(
            self._store, model, component=component, strict=strict, rehash=rehash
        )
        self._phase = None if phase is None else check_phase(phase)
        if self._phase is not None:
            check_phase_is_declared(self._log.run.spec, self._phase)
        self._latest_only = latest_only
        self._patience = patience
        self._follow = follow
        self._end: int | None = None
        self._n = -1
        self._ready: _Ready | None = None
        # A thread of the caller's may fetch weights: one call at a time.
        self._lock = RLock()
        self.current: Checkpoint | None = None
        self.moved_bytes = 0

    def __repr__(self) -> str:
        current = "nothing yet" if self.current is None else self.current.ref
        return f"<Following {self._log.run_id}: {current}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        """Wait for newer weights, put them into the model and return their checkpoint."""
        self._patience.begin()
        if self._end is None and not self._follow:
            self._end = self._log.refresh().commits
        while True:
            before = self._log.run.next_slot
            taken = self.poll()
            if taken is not None:
                return taken
            if not self._follow or self.is_over or self._patience.is_over:
                raise StopIteration
            if self._log.run.next_slot > before:
                self._patience.encourage()
            self._patience.wait()

    def poll(self) -> Checkpoint | None:
        """Put newer weights into the model if there are any now; costs one request if not.

        Returns:
            Their checkpoint; `None` if the model has the newest already.

        Raises:
            IncompatibleState: They do not fit the model, which is unchanged.
            IntegrityError: An object is damaged or gone; the model is unchanged.
        """
        with self._lock:
            before = self._ready
            if self.fetch() is None:
                return None
            return self._swap(is_fresh=self._ready is not before)

    def fetch(self) -> Checkpoint | None:
        """Fetch newer weights for `swap`, if there are any now; the model is only read.

        Another thread may do this while the model is in use: `swap` then only hashes the chunks
        that stay, and copies the chunks that changed.

        Returns:
            Their checkpoint; `None` if the model has the newest already.

        Raises:
            IncompatibleState: They do not fit the model.
            IntegrityError: An object is damaged or gone.
        """
        with self._lock:
            self._log.refresh()
            while (record := self._due()) is not None:
                if self._ready is not None and self._ready.n == record.n:
                    return self._ready.checkpoint
                checkpoint = Checkpoint(self._store, self._log, record)
                try:
                    self._ready = _Ready(checkpoint, record.n, self._prepare(checkpoint))
                except (IncompatibleState, MissingObject, NotFound) as error:
                    is_dropped = self._log.refresh().dropped is not None
                    if checkpoint.parts is not None and not self._latest_only:
                        self._n = record.n  # it was thinned; the next one may have the weights
                    # Evicted and collected while it was read: there is a newer one.
                    elif not isinstance(error, MissingObject) or not (
                        is_dropped or checkpoint.is_evicted
                    ):
                        raise
            self._ready = None
            return None

    def swap(self) -> Checkpoint | None:
        """Put the weights of the last `fetch` into the model.

        If the model was written to since, this may fetch more chunks first.

        Returns:
            The checkpoint; `None` if no weights are ready.

        Raises:
            IncompatibleState: The model has other shapes now.
            IntegrityError: Another object was needed and is damaged or gone.
        """
        with self._lock:
            return self._swap(is_fresh=False)

    def _swap(self, *, is_fresh: bool) -> Checkpoint | None:
        ready, self._ready = self._ready, None
        if ready is None:
            return None
        exchange = ready.exchange
        if not is_fresh:
            exchange = self._prepare(ready.checkpoint, exchange)
        self._model.put(exchange)
        self._n, self.current = ready.n, ready.checkpoint
        self.moved_bytes = exchange.moved_bytes
        return ready.checkpoint

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the tensors that the last swap wrote to."""
        return self._model.changed

    @property
    def changed_bytes(self) -> int:
        """Bytes that the last swap wrote into the model."""
        return self._model.changed_bytes

    @property
    def is_over(self) -> bool:
        """Whether no newer checkpoint can come, by the part of the log that was read."""
        run = self._log.run
        return run.dropped is not None or (run.status in OVER and self._due() is None)

    def _due(self) -> CheckpointRecord | None:
        """Return the checkpoint whose weights the model gets next."""
        run = self._log.run
        if self._latest_only:
            latest = run.latest(self._phase)
            is_news = latest is not None and latest.n != self._n
            return latest if is_news and self._is_known(latest) else None
        for record in run.live(self._phase):
            if record.n > self._n and not record.held_back and self._is_known(record):
                return record
        return None

    def _is_known(self, record: CheckpointRecord | None) -> bool:
        return record is not None and (self._end is None or record.n < self._end)

    def _prepare(self, checkpoint: Checkpoint, before: Exchange | None = None) -> Exchange:
        reader = checkpoint.handle.reader
        base = reader.base() if before is None else before.base
        while True:
            try:
                return self._model.prepare(checkpoint.ref, base, before)
            except MissingObject:
                self._log.refresh()
                if reader.place == base.place:
                    raise
                base = reader.base()  # a repack has moved it
