"""The log `epochs/` of a registry: sweeps with their condemned keys, upgrades, forgotten runs.

An entry is a header: epoch, kind, least writer version from this epoch on, forgotten runs, and the
tables of all condemned names (`holdfast.registry.history.condemned_names`). Before an upgrade a
sweep has its names in lines after the header instead, one line for each leading byte. Entries are
put-if-absent, dense from 1, never deleted. Writers (`holdfast.registry.writing.object_writer`) read
them, collectors (`holdfast.registry.upkeep.gc`) add to them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from holdfast.backends.escape import quoted
from holdfast.registry.errors import (
    Conflict,
    Frozen,
    Hint,
    IntegrityError,
    Malformed,
    ObjectNotFound,
)
from holdfast.registry.history.condemned_names import CondemnedNames, SweepTable, due
from holdfast.registry.objects import (
    EPOCHS,
    LAST,
    ObjectKey,
    epoch_key,
    join_lines,
    parse_number,
    split_lines,
)
from holdfast.registry.store import WRITER_VERSION, Store, check_writer_version, gaps
from holdfast.registry.values import Field, Record

_LOGGER = logging.getLogger("holdfast")
#: The first writer version that knows forgotten runs.
_FORGETS = 2
#: The first that knows tables of condemned names.
_TABLES = 3
#: The first that knows markers: from it on runs are sealed.
_SEALS = 4

#: The kinds of entries.
Entry = Literal["sweep", "upgrade", "forget", "freeze", "thaw", "drops"]
#: Characters of the URL to which a registry has moved.
MAX_URL = 1024
#: For how long a dropped run can be taken back, where no epoch says otherwise.
_DROP_DELAY_S = 7 * 86_400


class EpochHeader(Record):
    """First line of an entry."""

    format: Literal["holdfast.epoch/1", "holdfast.epoch/2"] = "holdfast.epoch/1"
    epoch: Annotated[int, Field(ge=1)]  # its number
    #: A `sweep` condemns keys; an `upgrade` only raises the least writer version; a `forget` adds
    #: runs to `forgotten`.
    #: `freeze` forbids writing, and `thaw` allows it again. `drops` sets what follows a drop.
    entry: Entry
    #: Least writer version from this epoch on; it never decreases.
    min_writer: Annotated[int, Field(ge=1)] = 1
    #: Every run that was forgotten up to this epoch, with the slot that ends its log.
    forgotten: dict[str, Annotated[int, Field(ge=0)]] | None = None
    #: In format 2: the first epoch whose names are in the tables.
    since: Annotated[int, Field(ge=1)] | None = None
    #: The tables of all names that the epochs from there on condemned, the newest last. That of
    #: this sweep is the last one, and joins no other.
    tables: tuple[SweepTable, ...] | None = None
    #: From a freeze to its thaw: where the registry has moved to; empty if it only rests.
    moved_to: Annotated[str, Field(max_length=MAX_URL)] | None = None
    #: Seconds for which a dropped run can be taken back; absent for the default.
    drop_delay_s: Annotated[int, Field(ge=0)] | None = None
    #: Collections free nothing that evictions and drops released.
    keep: Literal[True] | None = None

    @property
    def drop_s(self) -> int:
        """For how many seconds a dropped run can be taken back."""
        return _DROP_DELAY_S if self.drop_delay_s is None else self.drop_delay_s

    def after(self, epoch: int, entry: Entry, **given: Any) -> Self:
        """Return the header of the next entry, which repeats what stays true."""
        return self.changed(epoch=epoch, entry=entry, **given)


#: Stands for the epoch before the first.
_FIRST = EpochHeader.unchecked(epoch=0, entry="sweep")


class CondemnedShard(Record):
    """Condemned keys whose digests begin with one byte."""

    shard: Annotated[str, Field(pattern=r"^[0-9a-f]{2}$")]
    keys: tuple[str, ...]


def encode_sweep(epoch: int, condemned: Iterable[ObjectKey], before: EpochHeader = _FIRST) -> bytes:
    """Return the entry of a sweep."""
    shards: dict[str, list[str]] = {}
    for key in sorted(condemned):
        shards.setdefault(key.digest[:1].hex(), []).append(str(key))
    lines = [before.after(epoch, "sweep").encode()]
    lines += [
        CondemnedShard(shard=shard, keys=tuple(keys)).encode() for shard, keys in shards.items()
    ]
    return join_lines(lines)


def encode_upgrade(
    epoch: int, min_writer: int, before: EpochHeader = _FIRST, entry: Entry = "upgrade"
) -> bytes:
    """Return the entry of an upgrade; from version 3 on sweeps have their names in tables."""
    header = before.after(epoch, entry, min_writer=min_writer)
    if min_writer >= _TABLES and header.tables is None:
        header = header.after(epoch, entry, format="holdfast.epoch/2", since=epoch, tables=())
    return join_lines([header.encode()])


def encode_freeze(epoch: int, moved_to: str | None, before: EpochHeader) -> bytes:
    """Return the entry of a freeze, or without a text of a thaw; it upgrades the registry, too."""
    entry: Entry = "thaw" if moved_to is None else "freeze"
    least = max(before.min_writer, WRITER_VERSION)
    return encode_upgrade(epoch, least, before.changed(moved_to=moved_to), entry)


def encode_drops(epoch: int, before: EpochHeader, **rules: int | None) -> bytes:
    """Return the entry that sets what follows a drop; it upgrades the registry, too."""
    least = max(before.min_writer, WRITER_VERSION)
    return encode_upgrade(epoch, least, before.changed(**rules), "drops")


def encode_forget(epoch: int, forgotten: Mapping[str, int], before: EpochHeader) -> bytes:
    """Return the entry that adds runs, with the slots that end their logs, to the forgotten."""
    every = {**(before.forgotten or {}), **forgotten}
    least = max(before.min_writer, _FORGETS)
    return join_lines([before.after(epoch, "forget", min_writer=least, forgotten=every).encode()])


class CondemnedKeys:
    """The keys that one sweep condemned, kept as encoded lines to save memory."""

    def __init__(self, shards: Mapping[str, bytes]) -> None:
        self._shards = shards

    def all(self) -> Iterable[ObjectKey]:
        """Yield every key."""
        for line in self._shards.values():
            yield from map(ObjectKey.parse, json.loads(line)["keys"])

    def __contains__(self, key: ObjectKey) -> bool:
        # The lines are canonical JSON: a key has one spelling, within quotes.
        return f'"{key}"'.encode() in self._shards.get(key.digest[:1].hex(), b"")


class Epochs:
    """The epochs of a registry.

    Entries are immutable, and kept after they were read. The newest one names the tables of all
    names that were condemned since the upgrade. Of the sweeps before it, a writer reads all that
    are newer than the oldest generation among the objects that it uses again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[int, tuple[EpochHeader, CondemnedKeys]] = {}
        self._durable = 0
        self.names = CondemnedNames(store)  # reads and puts the tables

    @classmethod
    def of(cls, store: Store) -> Epochs:
        """Return the object that all writers of an open registry share."""
        shared: Epochs = store.companions.setdefault(cls, cls(store))
        return shared

    def observe(self) -> int:
        """Return the highest dense epoch; 0 before the first."""
        newest = self.newest()
        self.require(newest)
        return newest

    def newest(self) -> int:
        """Return the highest dense epoch also where nobody may write."""
        backend, heads = self._store.backend, self._store.heads
        seen = heads.epoch if heads is not None else 0  # another thread may add one meanwhile
        listed = [parse_number(info.key) for info in backend.list(EPOCHS)]
        gap = next(gaps(backend, listed, epoch_key, 1), None)
        if gap is not None:
            raise Malformed("the log of epochs has a gap", where=epoch_key(gap))
        highest = listed[-1] if listed else 0
        if heads is not None:
            heads.check_epoch(highest, seen)
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
        check_writer_version(header.min_writer, where=epoch_key(epoch))
        if header.moved_to is None:
            return
        newest = self.newest()  # it may allow writing again
        moved_to = self.header(newest).moved_to
        if not newest or moved_to is not None:
            raise Frozen(
                "this registry was frozen: nobody may write to it",
                where=f"{self._store.backend.url}, {epoch_key(epoch)}",
                found=f"it has moved to {quoted(moved_to)}" if moved_to else None,
                hint=Hint(
                    f"Nothing was committed. Open {quoted(moved_to)} to go on.",
                    f"Nothing was committed. Name it with -r {quoted(moved_to)}.",
                )
                if moved_to
                else "Nothing was committed. `holdfast freeze --off` allows writing again.",
            )

    def check_not_forgotten(self, run_id: str, epoch: int) -> None:
        """Refuse to write to a run that was forgotten, even if its log is another one by now."""
        if run_id in (self.header(epoch).forgotten or ()):
            what = f"the run was forgotten by {epoch_key(epoch)}, and its objects may be deleted"
            raise Conflict(what, where=run_id, hint="Save into another run.")

    def seals(self, epoch: int) -> bool:
        """Return whether collectors that have observed an epoch seal runs."""
        return self.header(epoch).min_writer >= _SEALS

    def header(self, epoch: int) -> EpochHeader:
        """Return the header of an epoch; before the first, one with the defaults."""
        return self._entry(epoch)[0] if epoch else _FIRST

    def _entry(self, epoch: int) -> tuple[EpochHeader, CondemnedKeys]:
        if epoch not in self._entries:
            self._entries[epoch] = self._read(epoch)
        return self._entries[epoch]

    def condemned(self, keys: Iterable[ObjectKey], observed: int) -> set[ObjectKey]:
        """Return the keys among `keys` that a sweep up to `observed` condemned.

        Only a sweep after a key's generation can name it: generation `g` is used only once epoch
        `g` exists. If a part of a table is absent or damaged, it may name any key.
        """
        wanted = {key for key in keys if key.generation < observed}
        if not wanted:
            return set()
        header, found = self.header(observed), set[ObjectKey]()
        for table in header.tables or ():
            older = {key for key in wanted - found if key.generation < table.last}
            try:
                found |= self.names.among(table, older) if older else set()
            except IntegrityError as error:
                _LOGGER.warning("%s; the content is stored again", error)
                found |= older
        epochs = range(
            min(key.generation for key in wanted) + 1, min(observed + 1, header.since or LAST)
        )
        # All at once: a registry that is swept every night has hundreds of epochs.
        for some in self._store.pools.small.map(lambda one: self.condemned_by(one, wanted), epochs):
            found |= some
        return found

    def condemned_by(self, epoch: int, keys: Collection[ObjectKey]) -> set[ObjectKey]:
        """Return the keys among `keys` that the sweep of one epoch condemned."""
        header, listed = self._entry(epoch)
        older = {key for key in keys if key.generation < epoch}
        if header.tables is None:
            return {key for key in older if key in listed}
        own = header.tables[-1:] if header.entry == "sweep" else ()
        return {key for table in own for key in self.names.among(table, older)}

    def put_sweep(self, epoch: int, condemned: Iterable[ObjectKey], *, joins: bool) -> bool:
        """Put the entry of a sweep, after the one that this object has read; return if it is ours.

        Its names, in the order of their records, are put first. `joins` says whether tables of
        older sweeps are joined, which takes space.
        """
        before = self.header(epoch - 1)
        if before.tables is None:
            entry = encode_sweep(epoch, condemned, before)
        else:
            since, tables = self._joined(before) if joins else (before.since, before.tables)
            own = self.names.put(condemned, epoch=epoch)
            header = before.after(epoch, "sweep", since=since, tables=(*tables, own))
            entry = join_lines([header.encode()])
        return self._store.backend.put_if_absent(epoch_key(epoch), entry)

    def _joined(self, before: EpochHeader) -> tuple[int, tuple[SweepTable, ...]]:
        """Join the newest tables; at first the names of sweeps from before there were tables."""
        tables, older = before.tables or (), range(1, before.since or 1)
        if older:
            entries = {epoch: self._entry(epoch) for epoch in older}
            names = {
                e: listed.all() for e, (one, listed) in entries.items() if one.entry == "sweep"
            }
            first = (self.names.join((), names),) if names else ()
            return 1, (*first, *tables)
        count = due(tables)
        if count > 1:
            tables = (*tables[:-count], self.names.join(tables[-count:], {}))
        return 1, tables

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
        is_in_tables = header.format == "holdfast.epoch/2"
        if is_in_tables != (header.tables is not None) or (is_in_tables and rest):
            raise Malformed("an entry with tables and lines, or neither", where=where)
        return header, _condemned(rest, where=where)


#: A line of condemned keys, which all begin with the digits of the shard.
_OTHER_KEY = rb'"(?:packs|manifests|placements)/\1/\1[0-9a-f]{62}\.(?:0|[1-9][0-9]*)"'
_FIRST_KEY = _OTHER_KEY.replace(rb"\1/", b"([0-9a-f]{2})/", 1)
_SHARD = re.compile(rb'\{"keys":\[%b(?:,%b)*\],"shard":"(\1)"\}' % (_FIRST_KEY, _OTHER_KEY))


def _condemned(lines: Iterable[bytes], *, where: str) -> CondemnedKeys:
    """Check the lines of condemned keys.

    A pattern does it, since parsing a hundred thousand keys would be slow.
    """
    shards: dict[str, bytes] = {}
    for line in lines:
        match = _SHARD.fullmatch(line)
        shard = match[2].decode() if match else ""
        if not shard or shard in shards:
            raise Malformed("not a line of condemned keys", where=where, found=quoted(line[:200]))
        shards[shard] = line
    return CondemnedKeys(shards)
