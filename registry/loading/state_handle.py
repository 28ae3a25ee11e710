"""The inner value of a stored state, which the rest of Holdfast takes.

Users hold a `holdfast.registry.loading.stored.Stored`; it owns such a handle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.errors import BeyondLimit, InvalidInput, Malformed
from holdfast.registry.history import RunLog, StateReader, decode_plain, step_ref
from holdfast.registry.history.actions import CommitKeys
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.objects import Manifest
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, collector_paused

if TYPE_CHECKING:
    from holdfast.registry.loading.destinations import LoadPrecision


class StateHandle:
    """A stored state: where it is, how it is read, and the keys that its commit keeps."""

    def __init__(self, store: Store, log: RunLog, digest: Digest, path: str) -> None:
        self.store = store
        self.log = log  # that of the run that keeps it, as it was read to find the state
        self.digest = digest
        self.path = path  # its ref within the run

    @cached_property
    def reader(self) -> StateReader:
        """Reads its objects."""
        return StateReader(self.store, self.log, self.digest, f"{self.log.run_id}/{self.path}")

    @property
    def ref(self) -> str:
        """Its ref, by which the registry finds it."""
        return f"{self.log.run_id}/{self.path}"

    @property
    def manifest(self) -> Manifest:
        """The description of the state."""
        return self.reader.manifest

    def commit_keys(self) -> CommitKeys | None:
        """Return the keys of the state that its commit stores instead of its manifest."""
        return None

    def file_keys(self) -> dict[str, Any]:
        """Return the plain values that a file of the state has besides its components."""
        return {}

    def facts(self) -> dict[str, object]:
        """Return the facts that a notebook shows above its components."""
        return {"id": self.digest}

    def load(
        self,
        only: str | Iterable[str] | None = None,
        map_location: object = "cpu",
        precision: LoadPrecision = "stored",
        *,
        portable: bool = False,
        most_bytes: int | None = None,
    ) -> Any:
        """Load it, or parts of it; `portable`: needs no torch and no adapter (`pytree.Adapted`)."""
        from holdfast.registry.loading.destinations import allocate, to_device
        from holdfast.registry.loading.selecting import select
        from holdfast.registry.spec.precision import widen_all

        manifest = self.reader.begin()
        if most_bytes is not None and manifest.nbytes > most_bytes:
            raise BeyondLimit(
                "too large", where=self.ref, expected=f"{most_bytes:,} bytes", found=manifest.nbytes
            )
        aside = self.kept_by_commit(manifest)
        names = [only] if isinstance(only, str) else None if only is None else list(only)
        if wrong := [name for name in names or () if not isinstance(name, str)]:
            raise InvalidInput("a component is named by a text", where=self.ref, found=wrong[0])
        chosen = None if names is None else [name for name in names if name not in aside]
        wanted = select(self.ref, manifest, chosen)
        self.reader.check_held(wanted)
        self.reader.check_lists(manifest)
        with self.reader.reading():
            with collector_paused():
                made = allocate(self.ref, wanted, precision, portable=portable)
            self.reader.read(manifest, made.targets)
            widen_all(made.widenings, self.store.pools.hashing)
            arrays = made.arrays
            del made  # it has a view of every tensor
            if str(map_location) != "cpu":
                arrays = {name: to_device(some, map_location) for name, some in arrays.items()}
            with collector_paused():
                parts = [(name, part.skeleton, arrays[name]) for name, part in wanted.items()]
                adapter = pytree.Adapted.of if portable else pytree.registered
                state = pytree.unflatten(manifest.kind, parts, adapter=adapter)
        return self._with_commit_keys(state, aside, names)

    def rebuild(self, arrays: Mapping[str, Sequence[object]]) -> Any:
        """Return the state with other arrays in place of its own, by component."""
        manifest = self.manifest
        parts = [(name, part.skeleton, arrays[name]) for name, part in manifest.components.items()]
        state = pytree.unflatten(manifest.kind, parts)
        return self._with_commit_keys(state, self.kept_by_commit(manifest), None)

    def kept_by_commit(self, manifest: Manifest) -> dict[str, Any]:
        """Return the plain values that its commit stores instead of its manifest."""
        kept = self.commit_keys()
        if kept is None:
            return {}
        aside = decode_plain(kept.values)
        keys = [*manifest.components, *(aside if isinstance(aside, dict) else ())]
        if not isinstance(aside, dict) or Counter(kept.order) != Counter(keys):
            raise Malformed(
                "the keys that the commit keeps do not fit the manifest",
                where=self.ref,
                expected=f"each of the keys {', '.join(kept.order)} in one of the two",
                found=", ".join(map(quoted, keys)),
                hint="`load_into` fills tensors without them; another checkpoint may be intact.",
            )
        return aside

    def _with_commit_keys(
        self, state: Any, aside: Mapping[str, Any], names: Iterable[str] | None
    ) -> Any:
        """Insert the keys that the commit stores at their positions in the state."""
        kept = self.commit_keys()
        if kept is None:
            return state
        wanted = set(kept.order if names is None else names)
        merged = {**state, **{name: aside[name] for name in wanted if name in aside}}
        return type(state)((name, merged[name]) for name in kept.order if name in merged)


class CheckpointHandle(StateHandle):
    """A checkpoint: a stored state with the record that was read first."""

    def __init__(self, store: Store, log: RunLog, record: CheckpointRecord) -> None:
        super().__init__(store, log, record.manifest, step_ref(record))
        self.record = record

    @property
    def n(self) -> int:
        """Number of the commit that added it."""
        return self.record.n

    def newest_record(self) -> CheckpointRecord:
        """Return its record, as far as the log was read; for an evicted one read all of the log."""
        n = self.record.n
        return self.log.knowing(n).by_n.get(n, self.record)

    @property
    def superseded(self) -> bool:
        """Whether training went back to an earlier one."""
        run, n = self.log.run, self.record.n
        known = n in run.by_n or run.is_evicted(n)
        return run.is_superseded(n) if known else self.record.superseded

    @property
    def ref(self) -> str:
        """Its ref: run, phase and step; run and id if it is superseded."""
        path = self.digest.short if self.superseded else self.path
        return f"{self.log.run_id}/{path}"

    def commit_keys(self) -> CommitKeys | None:
        """Return the keys of the state that its commit stores instead of its manifest."""
        return self.record.commit_keys

    def facts(self) -> dict[str, object]:
        """Return the facts that a notebook shows above its components."""
        from holdfast.registry.history import format_time
        from holdfast.registry.values import size

        run, n = self.log.run, self.record.n
        record = run.by_n.get(n, self.record)  # `newest_record` may read the log
        return {
            **super().facts(),
            "time": format_time(record.time_ms),
            "size": size(record.size_bytes),
            "tier": record.tier,
            "metrics": record.metrics,
            "companions": ", ".join(record.companions),
            "not finite": ", ".join(record.nonfinite),
            "state": "evicted" if run.is_evicted(n) else "superseded" if self.superseded else None,
            "thinned to": ", ".join(record.parts or ()),
        }
