"""A run of which a snapshot has only the newest records; the others are read on demand.

`RecentRun` is the run in the snapshot, `SnapshotPart` a file with older records, and `PartedRun`
the run that readers get. Replay folds further slots into the `RecentRun`; a slot that concerns
older records raises an error. The whole run is that of the snapshot, and these slots are folded
into it. Specified in docs/spec.md, section 8.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay.advance import Slot, advance
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.history.replay.run_parts import CheckpointRecord
from holdfast.registry.values import Digest, DigestField, Field, Record

#: Parts have the names of snapshots of the slots before this one.
PART_NAMES = 64

#: Slots after the snapshot that are kept, to be folded into the whole run.
_SLOTS_AT_MOST = 256

#: Reads the older records of slots after a snapshot, and of the run after them.
_Rest = Callable[[Sequence[Slot], "RecentRun"], RunManifest]
#: The same for the run of a snapshot, which comes first.
_Load = Callable[["RecentRun", Sequence[Slot], "RecentRun"], RunManifest]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class PartRef(Record):
    """A part that a snapshot names."""

    number: Annotated[int, Field(ge=0, le=PART_NAMES - 1)]  # the slot in its name
    digest: DigestField  # SHA-256 of the file


class SnapshotPart(Record):
    """Older records of a run: parts and the run are joined in the order of the snapshot."""

    checkpoints: tuple[CheckpointRecord, ...]
    places: tuple[Place, ...]


class RecentRun(RunManifest):
    """A compact run without the records that its parts have as they are.

    After further slots a record that it has is right; one that it lacks may be in a part.
    """

    floor: Annotated[int, Field(ge=1)]  # parts have no checkpoints of this commit and later ones
    older: Annotated[int, Field(ge=0)]  # how many kept checkpoints are only in the parts
    parts: tuple[PartRef, ...]  # the oldest one first

    def joined(self, parts: Iterable[SnapshotPart]) -> RunManifest:
        """Return the whole run."""
        records: dict[int, CheckpointRecord] = {}
        places: dict[Digest, Place] = {}
        lists = [(part.checkpoints, part.places) for part in parts]
        for own, placed in (*lists, (self.checkpoints, self.places)):
            records |= {one.n: one for one in own}
            places |= {place.manifest: place for place in placed}
        gone = self.gone if self.gone and self.gone.checkpoints else None
        kept = sorted(records if gone is None else (n for n in records if not gone.has(n)))
        whole = RunManifest.unchecked(
            **self.shared(RunManifest) | {"checkpoints": tuple(records[n] for n in kept)}
        )
        held = whole.held
        return whole.changed(places=tuple(one for one in places.values() if one.manifest in held))


class PartedRun(RunManifest):
    """A compact run whose older records are read when something asks for them."""

    @classmethod
    def of_snapshot(cls, recent: RecentRun, load: _Load) -> "PartedRun":
        """Return the run of a snapshot; `load` reads the rest of it."""
        return cls._made(recent, lambda slots, after: load(recent, slots, after), ())

    @classmethod
    def _made(cls, recent: RecentRun, load: _Rest, slots: tuple[Slot, ...]) -> "PartedRun":
        made = cls.unchecked(**recent.shared(RunManifest))
        values = made.__dict__
        del values["checkpoints"], values["places"]  # the properties below take over
        values |= {"_recent": recent, "_load": load, "_slots": slots}
        return made

    @cached_property
    def _whole(self) -> RunManifest:
        whole: RunManifest = self.__dict__["_load"](self.__dict__["_slots"], self._near)
        return whole

    @property
    def _near(self) -> RecentRun:
        recent: RecentRun = self.__dict__["_recent"]
        return recent

    def whole(self) -> RunManifest:
        """Return the run with all its records."""
        return self._whole

    def advanced(self, slots: Iterable[Slot]) -> RunManifest:
        """Fold in further slots, without the older records if nothing asked for them yet."""
        if "_whole" in self.__dict__ or len(self.__dict__["_slots"]) >= _SLOTS_AT_MOST:
            return advance(self._whole, slots)
        further = tuple(slots)
        recent = advance(self._near, further)
        assert isinstance(recent, RecentRun)
        since = (*self.__dict__["_slots"], *further)
        return PartedRun._made(recent, self.__dict__["_load"], since)

    @cached_property  # type: ignore[misc]
    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """All kept checkpoints."""
        return self._whole.checkpoints

    @cached_property  # type: ignore[misc]
    def places(self) -> tuple[Place, ...]:
        """The places of everything that is held."""
        return self._whole.places

    @cached_property
    def by_n(self) -> Mapping[int, CheckpointRecord]:  # type: ignore[override]
        """Checkpoints by the number of the commit that added them."""
        return _Layered(self._near.by_n, lambda: self._whole.by_n)

    @cached_property
    def by_manifest(self) -> Mapping[Digest, Place]:  # type: ignore[override]
        """Places by manifest."""
        return _Layered(self._near.by_manifest, lambda: self._whole.by_manifest)

    @property
    def count(self) -> int:
        """How many checkpoints were ever saved."""
        gone = self.gone.count if self.gone else 0
        return len(self._near.checkpoints) + self._near.older + gone

    @property
    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was ever saved."""
        return True

    @property
    def evicted(self) -> list[CheckpointRecord]:
        """The records of evicted checkpoints; a compact run has none."""
        return []

    def newest_first(self, phase: str | None = None) -> Iterator[CheckpointRecord]:
        """Yield the kept checkpoints of the current line of training, the newest first."""
        for one in self._near.newest_first(phase):
            if one.n < self._near.floor:
                break
            yield one
        for one in self._whole.newest_first(phase):
            if one.n < self._near.floor:
                yield one

    def as_dict(self) -> dict[str, Any]:
        """Return the values of its fields by name."""
        return self._whole.as_dict()

    def to_json(self, *, without: Iterable[str] = ()) -> dict[str, Any]:
        """Return the JSON value as stored."""
        return self._whole.to_json(without=without)

    def changed(self, **fields: Any) -> RunManifest:  # type: ignore[override]
        """Return a copy with other values."""
        return self._whole.changed(**fields)

    def __eq__(self, other: object) -> bool:
        return self._whole == (other.whole() if isinstance(other, RunManifest) else other)

    def __hash__(self) -> int:
        return hash(self._whole)


class _Layered(Mapping[_Key, _Value]):
    """A table that asks for all of it only if the nearest part does not have a key."""

    def __init__(self, near: Mapping[_Key, _Value], whole: Callable[[], Mapping[_Key, _Value]]):
        self._near, self._whole = near, whole

    def __getitem__(self, key: _Key) -> _Value:
        return self._near[key] if key in self._near else self._whole()[key]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())
