"""Make the new packs of a repack from verified chunks of others, each once.

Stored bytes are moved as they are, with codec and delta base, except for chunks that the plan
encodes again (`holdfast.registry.upkeep.repacking.chunks`).
`holdfast.registry.upkeep.repacking.repack_plan` chooses the packs,
`holdfast.registry.writing.object_writer` their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.backends import ByteRange
from holdfast.registry.objects import ObjectKey, PackEntry, PackRef, trailer
from holdfast.registry.store import Outcome, Progress, Store, Workers, is_sound, verify_chunk
from holdfast.registry.upkeep.repacking.repack_plan import Target
from holdfast.registry.writing import NewPack, ObjectWriter, put_pack

#: Chunks of one pack are read together up to this many bytes ...
_READ_BYTES = 16 * 2**20
#: ... and across gaps up to this size, because another request would cost more.
_GAP_BYTES = 2**20

#: A chunk to read: its offset in the pack that holds it, and its entry in the new one.
_Wanted = tuple[int, PackEntry]


@dataclass(frozen=True, slots=True)
class MadePack:
    """A pack that was put."""

    size_bytes: int
    recoded: int  # chunks in it that were encoded again
    recoded_before: int  # bytes of these chunks before ..
    recoded_after: int  # ... and after.


@dataclass(frozen=True, slots=True)
class PackBuild:
    """A pack to make, as a unit of work."""

    target: Target
    new: NewPack  # its key

    @property
    def held_bytes(self) -> int:
        """Memory that it takes; decoding and encoding take as much again."""
        return self.target.size_bytes * (2 if self.target.encoder else 1)


class Packs:
    """The new packs of a repack: chooses their keys, and lets workers make them."""

    def __init__(self, store: Store, workers: Workers, progress: Progress | None) -> None:
        self._here = Workers(None, store)
        self._workers = workers
        self._progress = progress
        self._sound: set[ObjectKey] = set()
        self.made: dict[ObjectKey, MadePack] = {}  # the packs that were put, by key
        self.bytes_moved = 0  # bytes of the chunks in them

    def provide(self, writer: ObjectWriter, targets: Sequence[Target]) -> list[PackRef]:
        """Make sure that whole packs are on the store under keys that a run may name."""

        def usable(_: Store, target: Target) -> ObjectKey | None:
            return writer.usable("packs", target.name, target.size_bytes)

        present = self._here.all(usable, targets)
        # The old packs may be deleted after this: no state may depend on a damaged pack.
        unsure = [
            PackRef(key, target.size_bytes)
            for key, target in zip(present, targets, strict=True)
            if key is not None and key not in self._sound
        ]
        checked = self._workers.all(is_sound, unsure, size_of=lambda pack: pack.size_bytes)
        for pack, sound in zip(unsure, checked, strict=True):
            (self._sound if sound else writer.suspect).add(pack.key)
        keys = [key if key in self._sound else None for key in present]
        builds = [
            PackBuild(target.alone(), writer.new_pack(target.name))
            for key, target in zip(keys, targets, strict=True)
            if key is None
        ]

        def take(build: PackBuild, done: Outcome[bool]) -> None:
            writer.note_pack(build.new, is_ours=done.result())
            self._count(build.new.key, build.target)

        self._workers.each(build_pack, builds, take, size_of=lambda build: build.held_bytes)
        built = (build.new.key for build in builds)
        return [
            PackRef(next(built) if key is None else key, target.size_bytes)
            for key, target in zip(keys, targets, strict=True)
        ]

    def _count(self, key: ObjectKey, target: Target) -> None:
        self._sound.add(key)
        self.made[key] = MadePack(
            target.size_bytes, len(target.recoded), target.before_bytes, target.recoded_bytes
        )
        self.bytes_moved += target.chunk_bytes
        if self._progress is not None:
            self._progress(self.bytes_moved)


def build_pack(store: Store, build: PackBuild) -> bool:
    """Make a new pack and put it; return whether this call put it."""
    body = make_body(store, build.target)
    return put_pack(store, build.new, [body], len(body))


def make_body(store: Store, target: Target) -> bytearray:
    """Return the bytes of a new pack, each chunk of it verified."""
    body = bytearray(target.size_bytes)
    view = memoryview(body)
    for pack, stretch in _stretches(target):
        start, stop = stretch[0][0], stretch[-1][0] + stretch[-1][1].stored_bytes
        data = memoryview(store.read_part(pack, ByteRange(start, stop)))
        for offset, entry in stretch:
            stored = data[offset - start :][: entry.stored_bytes]
            _verify(stored, entry, pack.key, offset)
            view[entry.offset :][: entry.stored_bytes] = stored
    if target.encoder is not None:
        for entry, made in target.encoder.encode(store, target.recoded):
            view[entry.offset :][: entry.stored_bytes] = made
    view[target.chunk_bytes :] = target.encoded + trailer(target.encoded)
    return body


def _stretches(target: Target) -> Iterator[tuple[PackRef, list[_Wanted]]]:
    """Yield chunks that are read together: neighbours in one pack."""
    wanted: dict[PackRef, list[_Wanted]] = {}
    for entry, source in zip(target.table, target.sources, strict=True):
        if source is not None:
            pack, offset = source
            wanted.setdefault(pack, []).append((offset, entry))
    for pack, chunks in wanted.items():
        chunks.sort(key=lambda chunk: chunk[0])
        stretch: list[_Wanted] = []
        start = end = 0
        for offset, entry in chunks:
            if stretch and (offset - end > _GAP_BYTES or end - start >= _READ_BYTES):
                yield pack, stretch
                stretch = []
            if not stretch:
                start = offset
            stretch.append((offset, entry))
            end = offset + entry.stored_bytes
        yield pack, stretch


def _verify(stored: memoryview, entry: PackEntry, key: ObjectKey, offset: int) -> None:
    """Check the stored bytes of a chunk; in every codec but `raw` they have their own digest."""
    verify_chunk(stored, entry.stored_digest or entry.digest, key, offset)
