"""The registry-wide log `epochs/`: sweeps with the keys that they condemn, and upgrades.

An entry is a file of lines: a header (epoch, kind, least writer version from here on), then, for a
sweep, one line for each leading byte with the condemned keys under it. Entries are put-if-absent,
dense from 1, never deleted. Writers read them (`registry.writer`), collectors add to them
(`registry.maintenance.gc`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from registry.errors import Malformed, ObjectNotFound
from registry.framing import join_lines, split_lines
from registry.keys import EPOCHS, ObjectKey, epoch_key, parse_number
from registry.records import Record
from registry.store import Store, check_writer_version, gaps


class EpochHeader(Record):
    """First line of an entry.

    Attributes:
        epoch: Its number.
        entry: A `sweep` condemns keys; an `upgrade` only raises the least writer version.
        min_writer: Least writer version from this epoch on; never falls.
    """

    format: Literal["holdfast.epoch/1"] = "holdfast.epoch/1"
    epoch: Annotated[int, Field(ge=1)]
    entry: Literal["sweep", "upgrade"]
    min_writer: Annotated[int, Field(ge=1)] = 1


class CondemnedShard(Record):
    """Condemned keys whose digests begin with one byte."""

    shard: Annotated[str, Field(pattern=r"^[0-9a-f]{2}$")]
    keys: tuple[str, ...]


def encode_sweep(epoch: int, condemned: Iterable[ObjectKey], min_writer: int = 1) -> bytes:
    """Return the entry of a sweep."""
    shards: dict[str, list[str]] = {}
    for key in sorted(condemned):
        shards.setdefault(key.digest[:1].hex(), []).append(str(key))
    lines = [EpochHeader(epoch=epoch, entry="sweep", min_writer=min_writer).encode()]
    lines += [
        CondemnedShard(shard=shard, keys=tuple(keys)).encode() for shard, keys in shards.items()
    ]
    return join_lines(lines)


def encode_upgrade(epoch: int, min_writer: int) -> bytes:
    """Return the entry of an upgrade."""
    return join_lines([EpochHeader(epoch=epoch, entry="upgrade", min_writer=min_writer).encode()])


class Epochs:
    """What has been condemned so far, as one handle knows it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[int, tuple[EpochHeader, frozenset[ObjectKey]]] = {}

    def observe(self) -> int:
        """Return the highest dense epoch; 0 before the first.

        Raises:
            UnsupportedFormat: The registry demands a newer writer.
            IntegrityError: The newest entry is damaged.
        """
        backend = self._store.backend
        listed = [parse_number(info.key) for info in backend.list(EPOCHS)]
        gap = next(gaps(backend, listed, epoch_key, 1), None)
        if gap is not None:
            raise Malformed("the log of epochs has a gap", where=epoch_key(gap))
        highest = listed[-1] if listed else 0
        self.require(highest)
        return highest

    def require(self, epoch: int) -> None:
        """Check that this writer may write after an epoch.

        Raises:
            UnsupportedFormat: The epoch demands a newer writer.
        """
        check_writer_version(self.min_writer(epoch), where=epoch_key(epoch))

    def min_writer(self, epoch: int) -> int:
        """Return the least version that may write after an epoch."""
        return self.entry(epoch)[0].min_writer if epoch else 1

    def entry(self, epoch: int) -> tuple[EpochHeader, frozenset[ObjectKey]]:
        """Return an entry's header and, of a sweep, the keys that it condemns.

        Raises:
            IntegrityError: It is absent or damaged.
        """
        # Entries are immutable, and only those after a key's generation are ever asked for.
        if epoch not in self._entries:
            self._entries[epoch] = self._read(epoch)
        return self._entries[epoch]

    def condemned(self, keys: Iterable[ObjectKey], observed: int) -> set[ObjectKey]:
        """Return those of `keys` that a sweep up to `observed` condemned.

        Only sweeps after a key's generation can name it: `g` is used only after epoch `g` stood.
        """
        suspects = set(keys)
        found: set[ObjectKey] = set()
        oldest = min((key.generation for key in suspects), default=observed)
        epochs = range(oldest + 1, observed + 1)
        # All at once: a registry that is swept every night has hundreds.
        for epoch, (_, listed) in zip(
            epochs, self._store.pools.small.map(self.entry, epochs), strict=True
        ):
            found |= {key for key in suspects & listed if key.generation < epoch}
        return found

    def _read(self, epoch: int) -> tuple[EpochHeader, frozenset[ObjectKey]]:
        where = epoch_key(epoch)
        try:
            data = self._store.backend.get(where)
        except ObjectNotFound as error:
            raise Malformed("an epoch that was marked is absent", where=where) from error
        first, *rest = split_lines(data, where=where)
        header = EpochHeader.decode(first, where=where)
        if header.epoch != epoch:
            raise Malformed(
                "another epoch's entry", where=where, expected=epoch, found=header.epoch
            )
        shards = [CondemnedShard.decode(line, where=where) for line in rest]
        return header, frozenset(ObjectKey.parse(key) for shard in shards for key in shard.keys)
