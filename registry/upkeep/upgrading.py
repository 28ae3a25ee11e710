"""Tell all programs of a registry something: to be of a newer version, to stop, how drops go.

An epoch says it, and the mark of that epoch in each run tells writers that are running. Nothing is
rewritten: what is there stays readable. Specified in docs/spec.md, section 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast.backends import parse
from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import (
    MAX_URL,
    EpochHeader,
    Epochs,
    RunLog,
    encode_drops,
    encode_freeze,
    encode_upgrade,
)
from holdfast.registry.history.actions import Line, Mark
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import epoch_key
from holdfast.registry.store import (
    RUNS_AT_ONCE,
    WRITER_VERSION,
    Store,
    check_writer_version,
    in_batches,
)
from holdfast.registry.upkeep.live import UNREADABLE, is_forgotten, list_run_ids, with_way_out

#: The longest delay of a drop: 3,000 years.
_LONGEST_S = 10**11


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """Report of an upgrade.

    Attributes:
        min_writer: The least writer version from now on.
        raised: Whether this upgrade has raised it.
        epoch: The epoch that every run is marked with.
        runs: Number of runs.
        marked: Runs that this upgrade has marked; the others had a mark, or were dropped.
    """

    min_writer: int
    raised: bool
    epoch: int
    runs: int
    marked: int


@dataclass(frozen=True, slots=True)
class DropRules:
    """Rules of a registry for dropped runs.

    Attributes:
        delay_s: For how many seconds a dropped run can be taken back.
        keep: Whether collections free nothing that evictions, thinnings and drops release.
        epoch: The epoch that was read, or that sets them; 0 before the first.
    """

    delay_s: int
    keep: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Report of a freeze or a thaw.

    Attributes:
        moved_to: Where the registry goes on; empty if it only rests, `None` after a thaw.
        epoch: The epoch that says so, with which every run is marked.
        runs: Number of runs.
        marked: Runs that this call has marked; the others had a mark, or were dropped.
    """

    moved_to: str | None
    epoch: int
    runs: int
    marked: int


def upgrade(store: Store) -> UpgradeReport:
    """Raise the least writer version to this program's, and mark every run; see `Registry`."""

    def entry(epoch: int, header: EpochHeader) -> bytes | None:
        is_so = header.min_writer >= WRITER_VERSION
        return None if is_so else encode_upgrade(epoch, WRITER_VERSION, header)

    Epochs(store).observe()  # a frozen registry stays as it is
    header, raised, runs, marked = _tell(store, entry)
    return UpgradeReport(header.min_writer, raised, header.epoch, runs, marked)


def set_drop_rules(store: Store, delay_s: float | None, keep: bool | None) -> DropRules:
    """Set rules for dropped runs, or only return them; see `Registry.drop_rules`."""
    epochs = Epochs(store)
    newest = epochs.newest()
    header = epochs.header(newest)
    number = isinstance(delay_s, (int, float)) and not isinstance(delay_s, bool)
    if delay_s is not None and not (number and 0 <= delay_s <= _LONGEST_S):
        raise InvalidInput("a delay is a number of seconds, 0 or more", found=quoted(delay_s))
    given: dict[str, int | None] = {} if delay_s is None else {"drop_delay_s": int(delay_s)}
    given |= {} if keep is None else {"keep": keep or None}

    def entry(epoch: int, header: EpochHeader) -> bytes | None:
        is_so = all(getattr(header, name) == value for name, value in given.items())
        return None if is_so and header.epoch else encode_drops(epoch, header, **given)

    if given:
        epochs.require(newest)  # a frozen registry stays as it is
        header, *_ = _tell(store, entry)
    return DropRules(header.drop_s, bool(header.keep), header.epoch)


def freeze(store: Store, moved_to: str | None) -> FreezeReport:
    """Forbid writing; see `Registry`."""
    return _set_frozen(store, "" if moved_to is None else _url(store, moved_to))


def thaw(store: Store) -> FreezeReport:
    """Allow writing again; see `Registry`."""
    return _set_frozen(store, None)


def _set_frozen(store: Store, moved_to: str | None) -> FreezeReport:
    def entry(epoch: int, header: EpochHeader) -> bytes | None:
        check_writer_version(header.min_writer, where=epoch_key(header.epoch))
        is_so = header.moved_to == moved_to
        return None if is_so else encode_freeze(epoch, moved_to, header)

    if moved_to is None and not Epochs(store).newest():
        return FreezeReport(None, 0, len(list_run_ids(store, {})), 0)
    header, _, runs, marked = _tell(store, entry)
    return FreezeReport(header.moved_to, header.epoch, runs, marked)


def _url(store: Store, moved_to: str) -> str:
    """Check where a registry goes on, as everybody who reads the epoch will be told."""
    url = parse(moved_to).url
    if url == store.backend.url or len(url) > MAX_URL:
        raise InvalidInput(
            "a registry cannot move there",
            where=url[:200],
            expected=f"another place, in at most {MAX_URL} characters",
        )
    return url


def _tell(
    store: Store, entry: Callable[[int, EpochHeader], bytes | None]
) -> tuple[EpochHeader, bool, int, int]:
    """Put an entry unless `entry` finds it needless, and mark every run with the newest one.

    Return that one, whether it is ours, the number of runs and that of marks.
    """
    store.prepare_writing()
    epochs, is_ours = Epochs(store), False
    while True:
        newest = epochs.newest()
        epochs.make_durable(newest)
        header = epochs.header(newest)
        data = entry(newest + 1, header)
        if data is None:
            break
        is_ours = store.backend.put_if_absent(epoch_key(newest + 1), data)
    forgotten = header.forgotten or {}
    # After the epoch, as in a sweep: whoever creates a run later observes it.
    runs = list_run_ids(store, forgotten)
    mark = partial(_mark, store, newest, forgotten)
    marked = sum(in_batches(store.pools.bulk, mark, runs, at_once=RUNS_AT_ONCE))
    return header, is_ours, len(runs), marked


def _mark(store: Store, epoch: int, forgotten: dict[str, int], run_id: str) -> bool:
    """Mark a run; return whether it needed that."""
    log = RunLog(store, run_id)
    needed = False

    def compose(run: RunManifest) -> list[Line] | None:
        nonlocal needed
        needed = run.next_slot > 0 and run.epoch < epoch and not run.is_dropped_for_good
        return [Mark(epoch=epoch)] if needed else None

    try:
        log.open()
        log.append(compose, announces=False)
    except UNREADABLE as error:
        if is_forgotten(store, forgotten, run_id):
            return False
        raise with_way_out(error, run_id, "upgrades the others") from error
    return needed
