"""Read and parse the immutable objects of a registry by their typed keys.

Owns the reading of manifests, placements and the configuration, and the thread pools of a handle.
`holdfast.registry.writing.object_writer` chooses the keys of new objects, and
`holdfast.registry.history.log` owns the logs.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self, TypeVar

from holdfast.backends import Backend, ByteRange, refuse_links
from holdfast.registry import pytree
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    Hint,
    Malformed,
    MissingObject,
    NotFound,
    ObjectNotFound,
    ObjectTruncated,
    StoreFull,
    UnsupportedFormat,
    UnsupportedValue,
)
from holdfast.registry.objects import (
    CONFIG,
    FOLDERS,
    PROBES,
    RUNS,
    Manifest,
    ObjectKey,
    PackRef,
    PackTable,
    Placement,
    join_lines,
    read_pack_table,
    split_lines,
)
from holdfast.registry.store.address import Address
from holdfast.registry.store.blocks import Blocks
from holdfast.registry.store.heads import Heads
from holdfast.registry.store.threads import Pools
from holdfast.registry.values import Field, ProcessLock, Record

if TYPE_CHECKING:
    from holdfast.registry.store.chunk_cache import ChunkCache

REGISTRY_FORMAT: Literal["holdfast.registry/1"] = "holdfast.registry/1"
#: The version of this writer; an entry of `epochs/` may demand a higher one.
WRITER_VERSION = 4
#: The grace of a collection where none is given.
DAY_S = 86_400.0
#: The most parsed manifests that a handle keeps, and the most placements.
_KEPT = 32
#: The most bytes of their content, apart from the newest; as objects they take more memory.
_KEPT_BYTES = 32 * 2**20
#: The most tables of packs; one state with deltas can need many.
_KEPT_TABLES = 256

#: Files of the reserve that are freed first: enough for a slot and its folders.
_LEAST_GIVEN = 4

_T = TypeVar("_T")


class RegistryConfig(Record):
    """`registry.json`: written once, by put-if-absent."""

    format: Literal["holdfast.registry/1"] = REGISTRY_FORMAT
    #: Random; it identifies the registry wherever it is mounted.
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    created_ms: int  # milliseconds since the epoch by the creator's clock
    #: Whether `init` raced the store's put-if-absent, or was asked to skip that.
    race_probe: Literal["passed", "skipped"]
    min_writer: Annotated[int, Field(ge=1)] = 1  # lowest writer version that may write
    #: The default compression of a save; `None` for raw chunks.
    compression: Literal["auto", "zstd", "lz4"] | None = None
    #: The default of a save: how often a chunk that changes each time is stored whole; `None` for
    #: always.
    keyframe_every: Annotated[int, Field(ge=2, le=32)] | None = None


class Store:
    """The objects of one registry behind a backend."""

    def __init__(
        self,
        backend: Backend,
        config: RegistryConfig,
        cache: "ChunkCache | None" = None,
        heads: Heads | None = None,
        address: Address | None = None,
    ) -> None:
        #: Where another process finds it; `None` if it was opened on a backend.
        self.address = address
        self.backend = backend  # the store of the bytes
        self.config = config  # the content of `registry.json`
        self.pools = Pools(backend.concurrency)  # the handle's threads
        self.blocks = Blocks()  # the memory for the copies of saves
        self.cache = cache  # the cache of chunks on a local disk, if there is one
        self.heads = heads  # the heads of its logs that were seen before, if they are remembered
        self.signer: Any = None  # signs the commits of this handle: a `CommitSigner`, if any
        #: Whether the registry did not answer when it was opened, and has not since.
        self.is_away = False
        #: What rooms above keep for this handle, by class. It goes with the handle.
        self.companions: dict[type, Any] = {}
        self._manifests: OrderedDict[ObjectKey, Manifest] = OrderedDict()
        self._placements: OrderedDict[ObjectKey, Placement] = OrderedDict()
        self._tables: OrderedDict[ObjectKey, PackTable] = OrderedDict()
        self._lock = ProcessLock()
        self._is_prepared = False

    def __copy__(self) -> Self:
        """Return another view of the same registry, with which checks go round the caches."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Every handle has a store, so this is where pickle and deepcopy of each of them end.
        raise UnsupportedValue(
            "a handle of a registry cannot be pickled or copied: it has threads and connections",
            where=self.backend.url,
            hint="Pass the URL and, for a checkpoint, its ref: the other process opens them with "
            "holdfast.open(URL) and .checkpoint(REF).",
        )

    def prepare_writing(self) -> None:
        """Prepare the first write of a handle, once.

        Check that the folders that all runs share have no symbolic links directly in them; each
        write checks its own path. Then fill the reserve.
        """
        if not self._is_prepared:
            for folder in FOLDERS:
                refuse_links(self.backend, folder, delimiter=True)
            self.backend.keep_reserve(RUNS)
            self._is_prepared = True

    def with_reserve(self, write: Callable[[], _T]) -> _T:
        """Run a write that helps to free space; if the store is full, free the reserve for it.

        It frees a little at first and more each time: a collection after an eviction needs the
        rest.
        """
        most = _LEAST_GIVEN
        while True:
            try:
                return write()
            except StoreFull:
                if not self.backend.give_up_reserve(most):
                    raise
                most *= 2

    def manifest(self, key: ObjectKey) -> Manifest:
        """Return a verified manifest."""
        kept = self._recall(self._manifests, key)
        if kept is None:
            kept = decode_manifest(self.read(key), key)
            self.remember(key, kept)
        return kept

    def placement(self, key: ObjectKey) -> Placement:
        """Return a verified placement."""
        kept = self._recall(self._placements, key)
        if kept is None:
            kept = Placement.decode(self.read(key), key.digest, where=str(key))
            self.remember(key, kept)
        return kept

    def table(self, pack: PackRef, after: int = 0) -> PackTable:
        """Return a pack's verified table of contents, and keep it for its other chunks.

        `after` is the end of its last known chunk.
        """
        kept = self._recall(self._tables, pack.key)
        if kept is None:
            kept = self.read_table(pack, after)
            self._keep(self._tables, pack.key, kept, _KEPT_TABLES)
        return kept

    def read_table(self, pack: PackRef, after: int = 0) -> PackTable:
        """Read only the end of a pack, after a known chunk, and verify its table of contents."""

        def read(start: int, stop: int) -> bytes:
            return self.read_part(pack, ByteRange(start, stop))

        where, name = str(pack.key), pack.key.digest
        return read_pack_table(read, pack.size_bytes, name, where=where, after=after)

    def read_part(
        self, pack: PackRef, byte_range: ByteRange, into: Sequence[memoryview] | None = None
    ) -> bytes:
        """Return bytes of a pack that must exist, or put them into memory, as `Backend.get`."""
        try:
            return self.backend.get(str(pack.key), byte_range, into=into)
        except ObjectNotFound as error:
            raise missing(pack.key) from error
        except ObjectTruncated as error:
            raise Damaged(
                "damaged pack: it ends too early",
                where=pack.key,
                expected=f"{pack.size_bytes} bytes",
                found=error.found,
            ) from error

    def remember(self, key: ObjectKey, value: Manifest | Placement) -> None:
        """Keep an object that was just read or written, so that it is not read again."""
        if isinstance(value, Manifest):
            self._keep(self._manifests, key, value)
            self._lighten(self._manifests)
        else:
            self._keep(self._placements, key, value)
            self._lighten(self._placements)

    def read(self, key: ObjectKey) -> bytes:
        """Return the bytes of an object that must exist, since a run needs it."""
        try:
            return self.backend.get(str(key))
        except ObjectNotFound as error:
            raise missing(key) from error

    def close(self) -> None:
        """Stop the threads, close the backend, and forget the objects that were read."""
        if self.heads is not None:
            self.heads.write()
        self.pools.close()
        self.backend.close()
        for kept in (self._manifests, self._placements, self._tables, self.companions):
            kept.clear()

    def _recall(self, kept: OrderedDict[ObjectKey, _T], key: ObjectKey) -> _T | None:
        with self._lock.here():
            if key in kept:
                kept.move_to_end(key)
            return kept.get(key)

    def _keep(
        self, kept: OrderedDict[ObjectKey, _T], key: ObjectKey, value: _T, most: int = _KEPT
    ) -> None:
        with self._lock.here():
            kept[key] = value
            if len(kept) > most:
                kept.popitem(last=False)

    def _lighten(
        self, kept: OrderedDict[ObjectKey, Manifest] | OrderedDict[ObjectKey, Placement]
    ) -> None:
        """Drop the oldest values until the others are within the bound; always keep the newest."""
        with self._lock.here():
            held = sum(value.content_bytes for value in kept.values())
            while held > _KEPT_BYTES and len(kept) > 1:
                held -= kept.popitem(last=False)[1].content_bytes


def decode_manifest(data: bytes, key: ObjectKey) -> Manifest:
    """Verify and parse a manifest, and check its skeletons against its tensors."""
    manifest = Manifest.decode(data, key.digest, where=str(key))
    for name, part in manifest.components.items():
        try:
            pytree.check_arrays(name, part.skeleton, part.tensors)
        except Malformed as error:
            raise Malformed(
                error.what,
                where=f"{key}: {error.where}",
                expected=error.expected,
                found=error.found,
                hint="It cannot be loaded: continue from another checkpoint.",
            ) from error
    return manifest


def gaps(
    backend: Backend, listed: Iterable[int], key_of: Callable[[int], str], start: int = 0
) -> Iterator[int]:
    """Yield the numbers that are missing from a dense series.

    A listing may show the last write of another process and not the one just before. So a number
    that is not listed is looked up by its key.
    """
    expected = start
    for number in listed:
        for between in range(expected, number):
            try:
                backend.stat(key_of(between))
            except ObjectNotFound:
                yield between
        expected = number + 1


def missing(key: ObjectKey) -> MissingObject:
    """Return the error for an object that a checkpoint needs and that does not exist."""
    return MissingObject(
        "an object that a checkpoint needs is gone",
        where=key,
        hint="Run `holdfast verify` to see what is affected; a mirror can restore it.",
    )


def create_config(
    backend: Backend,
    race_probe: Literal["passed", "skipped"],
    compression: Literal["auto", "zstd", "lz4"] | None = None,
    keyframe_every: int | None = None,
) -> RegistryConfig:
    """Write `registry.json` and return its content."""
    config = RegistryConfig(
        id=secrets.token_hex(16),
        created_ms=int(time.time() * 1000),
        race_probe=race_probe,
        compression=compression,
        keyframe_every=keyframe_every,
    )
    data = join_lines([config.encode()])
    if not backend.put_if_absent(CONFIG, data) and backend.get(CONFIG) != data:
        raise Conflict(
            "a registry exists here already",
            where=backend.url,
            hint=Hint(
                "Open it with `holdfast.open`, or use another folder or prefix.",
                "Name it with `--registry`, or use another folder or prefix.",
            ),
        )
    return config


def read_config(backend: Backend) -> RegistryConfig:
    """Read and check `registry.json`."""
    where = f"{backend.url}/{CONFIG}"
    try:
        data = backend.get(CONFIG)
    except ObjectNotFound:
        raise NotFound(
            "not a registry",
            where=backend.url,
            expected=CONFIG,
            hint=Hint(
                f"Create one with `holdfast.init('{backend.url}')`, or check the name.",
                f"Create one with `holdfast init {backend.url}`, or check the name.",
            ),
        ) from None  # a short traceback for a usual mistake: there is no more to say
    (line, *_) = split_lines(data, where=where)
    if b'"format":"holdfast.registry/1"' not in line:
        raise UnsupportedFormat(
            "unknown registry format",
            where=where,
            expected=REGISTRY_FORMAT,
            found=line[:80].decode("utf-8", "replace"),
            hint="It was made by another version of Holdfast: upgrade this one.",
        )
    config = RegistryConfig.decode(line, where=where)
    check_writer_version(config.min_writer, where=where)
    return config


def check_writer_version(min_writer: int, *, where: str) -> None:
    """Refuse a registry that demands a newer writer."""
    if min_writer > WRITER_VERSION:
        raise UnsupportedFormat(
            "the registry demands a newer Holdfast",
            where=where,
            expected=f"writer version {min_writer}",
            found=f"writer version {WRITER_VERSION}",
            hint="Upgrade with `pip install -U holdfast-registry`.",
        )


def ask_time(store: Store) -> float | None:
    """Return the store's own time, in seconds; `None` if it has no space to say it."""
    key = f"{PROBES}clock-{secrets.token_hex(8)}"
    try:
        store.with_reserve(lambda: store.backend.put(key, b""))
    except StoreFull:
        return None
    try:
        return store.backend.stat(key).modified_s
    except ObjectNotFound:  # this one stalled, and another one deleted the old probe
        return ask_time(store)
    finally:
        store.backend.delete(key)
