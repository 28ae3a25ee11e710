"""The log `epochs/` of a registry: sweeps with their condemned keys, upgrades, forgotten runs.

An entry is a file of lines: a header (epoch, kind, least writer version from this epoch on, runs
that were forgotten), then, for a sweep, one line for each leading byte, with the condemned keys
that begin with it. Entries are
put-if-absent, dense from 1, never deleted. Writers (`holdfast.registry.writing.object_writer`) read
them, collectors (`holdfast.registry.upkeep.gc`) add to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Conflict, Malformed, ObjectNotFound
from holdfast.registry.objects import (
    EPOCHS,
    ObjectKey,
    epoch_key,
    join_lines,
    parse_number,
    split_lines,
)
from holdfast.registry.store import Store, check_writer_version, gaps
from holdfast.registry.values import Field, Record

#: The first writer version that knows forgotten runs.
_FORGETS = 2


class EpochHeader(Record):
    """First line of an entry."""

    format: Literal["holdfast.epoch/1"] = "holdfast.epoch/1"
    epoch: Annotated[int, Field(ge=1)]  # its number
    #: A `sweep` condemns keys; an `upgrade` only raises the least writer version; a `forget` adds
    #: runs to `forgotten`.
    entry: Literal["sweep", "upgrade", "forget"]
    #: Least writer version from this epoch on; it never decreases.
    min_writer: Annotated[int, Field(ge=1)] = 1
    #: Every run that was forgotten up to this epoch, with the slot that ends its log.
    forgotten: dict[str, Annotated[int, Field(ge=0)]] | None = None


#: Stands for the epoch before the first.
_FIRST = EpochHeader.unchecked(epoch=0, entry="sweep")


class CondemnedShard(Record):
    """Condemned keys whose digests begin with one byte."""

    shard: Annotated[str, Field(pattern=r"^[0-9a-f]{2}$")]
    keys: tuple[str, ...]


def encode_sweep(
    epoch: int, condemned: Iterable[ObjectKey], before: EpochHeader | None = None
) -> bytes:
    """Return the entry of a sweep."""
    shards: dict[str, list[str]] = {}
    for key in sorted(condemned):
        shards.setdefault(key.digest[:1].hex(), []).append(str(key))
    header = (before or _FIRST).changed(epoch=epoch, entry="sweep")
    lines = [header.encode()]
    lines += [
        CondemnedShard(shard=shard, keys=tuple(keys)).encode() for shard, keys in shards.items()
    ]
    return join_lines(lines)


def encode_upgrade(epoch: int, min_writer: int) -> bytes:
    """Return the entry of an upgrade."""
    return join_lines([EpochHeader(epoch=epoch, entry="upgrade", min_writer=min_writer).encode()])


def encode_forget(epoch: int, forgotten: Mapping[str, int], before: EpochHeader | None) -> bytes:
    """Return the entry that adds runs, with the slots that end their logs, to the forgotten."""
    before = before or _FIRST
    header = EpochHeader(
        epoch=epoch,
        entry="forget",
        min_writer=max(before.min_writer, _FORGETS),
        forgotten={**(before.forgotten or {}), **forgotten},
    )
    return join_lines([header.encode()])


class CondemnedKeys:
    """The keys that one sweep condemned, kept as encoded lines to save memory."""

    def __init__(self, shards: Mapping[str, bytes]) -> None:
        self._shards = shards

    def __contains__(self, key: ObjectKey) -> bool:
        # The lines are canonical JSON: a key has one spelling, within quotes.
        return f'"{key}"'.encode() in self._shards.get(key.digest[:1].hex(), b"")


class Epochs:
    """The epochs of a registry.

    Entries are immutable, and kept after they were read: a writer reads all that are newer than the
    oldest generation among the objects that it uses again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[int, tuple[EpochHeader, CondemnedKeys]] = {}
        self._durable = 0

    @classmethod
    def of(cls, store: Store) -> Epochs:
        """Return the object that all writers of an open registry share."""
        shared: Epochs = store.companions.setdefault(cls, cls(store))
        return shared

    def observe(self) -> int:
        """Return the highest dense epoch; 0 before the first."""
        backend, heads = self._store.backend, self._store.heads
        seen = heads.epoch if heads is not None else 0  # another thread may add one meanwhile
        listed = [parse_number(info.key) for info in backend.list(EPOCHS)]
        gap = next(gaps(backend, listed, epoch_key, 1), None)
        if gap is not None:
            raise Malformed("the log of epochs has a gap", where=epoch_key(gap))
        highest = listed[-1] if listed else 0
        if heads is not None:
            heads.check_epoch(highest, seen)
        self.require(highest)
        return highest

    def make_durable(self, epoch: int) -> None:
        """Make an epoch durable, and all before it.

        Nothing may be named, marked or deleted because of an epoch that is not durable: if it were
        lost, a sweep of other keys could get its number.
        """
        if epoch > self._durable:
            self._store.backend.make_durable([epoch_key(epoch)])
            self._durable = epoch

    def require(self, epoch: int) -> None:
        """Check that this writer may write after an epoch."""
        header = self.header(epoch)
        if header is not None:
            check_writer_version(header.min_writer, where=epoch_key(epoch))

    def check_not_forgotten(self, run_id: str, epoch: int) -> None:
        """Refuse to write to a run that was forgotten, even if its log is another one by now."""
        header = self.header(epoch)
        if header is not None and run_id in (header.forgotten or ()):
            what = f"the run was forgotten by {epoch_key(epoch)}, and its objects may be deleted"
            raise Conflict(what, where=run_id, hint="Save into another run.")

    def header(self, epoch: int) -> EpochHeader | None:
        """Return the header of an epoch; `None` before the first."""
        return self.entry(epoch)[0] if epoch else None

    def entry(self, epoch: int) -> tuple[EpochHeader, CondemnedKeys]:
        """Return an entry's header and, of a sweep, the keys that it condemns."""
        if epoch not in self._entries:
            self._entries[epoch] = self._read(epoch)
        return self._entries[epoch]

    def condemned(self, keys: Iterable[ObjectKey], observed: int) -> set[ObjectKey]:
        """Return the keys among `keys` that a sweep up to `observed` condemned.

        Only a sweep after a key's generation can name it: generation `g` is used only once epoch
        `g` exists.
        """
        wanted = set(keys)
        found: set[ObjectKey] = set()
        oldest = min((key.generation for key in wanted), default=observed)
        epochs = range(oldest + 1, observed + 1)
        # All at once: a registry that is swept every night has hundreds of epochs.
        for epoch, (_, listed) in zip(
            epochs, self._store.pools.small.map(self.entry, epochs), strict=True
        ):
            found |= {key for key in wanted if key.generation < epoch and key in listed}
        return found

    def _read(self, epoch: int) -> tuple[EpochHeader, CondemnedKeys]:
        where = epoch_key(epoch)
        try:
            data = self._store.backend.get(where)
        except ObjectNotFound as error:
            raise Malformed("a marked epoch is absent", where=where) from error
        first, *rest = split_lines(data, where=where)
        header = EpochHeader.decode(first, where=where)
        if header.epoch != epoch:
            raise Malformed(
                "another epoch's entry", where=where, expected=epoch, found=header.epoch
            )
        return header, _condemned(rest, where=where)


_SHARD = re.compile(rb'\{"keys":\[(.*)\],"shard":"([0-9a-f]{2})"\}')


def _condemned(lines: Iterable[bytes], *, where: str) -> CondemnedKeys:
    """Check the lines of condemned keys.

    A pattern does it, since parsing a hundred thousand keys would be slow.
    """
    shards: dict[str, bytes] = {}
    for line in lines:
        match = _SHARD.fullmatch(line)
        shard = match[2] if match else b""
        key = rb'"(?:packs|manifests|placements)/%b/%b[0-9a-f]{62}\.(?:0|[1-9][0-9]*)"'
        keys = rb"%b(?:,%b)*" % ((key % (shard, shard),) * 2)
        if match is None or not re.fullmatch(keys, match[1]) or shard.decode() in shards:
            raise Malformed("not a line of condemned keys", where=where, found=quoted(line[:200]))
        shards[shard.decode()] = line
    return CondemnedKeys(shards)
