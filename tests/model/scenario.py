"""Scenarios: the actors, the first state, and the rules that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.model.log import CHECKPOINT, PIN, Log


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol, each of which can be broken alone.

    Attributes:
        run_before_epoch: W1: the run exists before its writer observes the epoch.
        run_before_key: W1: the run exists before its writer chooses a key.
        slot_0_references_nothing: W1: a fork inherits in commit 1.
        refuse_condemned: W2: a key that a sweep up to u condemned is not used.
        generations: W2: content that is put again gets a new key, `<sha256>.<u>`.
        recheck: W3: a mark before the head moves u, and the chosen keys are checked again.
        exact_slot: W2a: a key needs no check only while it is live right before the commit's slot.
        held_only: W2a: it must be live there; a `place` line of an evicted state proves nothing.
        by_parts: W2a: ... and the place right before the slot must name the key: of a thinned state
            only what it still covers is live.
        relocation_checks: A relocation keeps W2 and W3 like every writer.
        one_slot: A sync commits everything that it copies in one slot.
        places_with_commits: ... and places no later than the commits that need them.
        publish_before_list: G1 before G2.
        every_run: G2 to G4 include every run, whatever its log looks like.
        forgotten_by_name: G0: a run that cannot be read is passed over only once it is forgotten.
        ended_first: G0: its log was ended before that.
        all_marked: G5 waits until every run is marked.
        shard_of_keys: G5: a shard is a part of the keys, so it waits for the marks of all runs, and
            not for those of a part of the runs.
        remark: G4: M_e comes from a replay after G1, not from the one before the keys were chosen.
        replay_reaches_mark: G4: ... and that reaches the mark.
        mark_of_this_epoch: G3: only a mark of this epoch or a later one serves.
        spare_the_live: G5: keys that are needed in M_e are not deleted.
        names_kept: A name stays condemned for ever: that it was deleted once is no evidence.
        freed_marked: G3: a run that was freed is marked, since an undrop may follow.
        undrop_adopts: D4: an undrop of a freed run chooses its keys by W1 to W4.
        undrop_looks: D2: an undrop is composed for the log that it lands on, freed or not.
        store_clock: D2: the store's clock decides whether the delay has passed, no other one.
        same_hide: D2: the drop that is freed is the one whose delay was judged.
    """

    run_before_epoch: bool = True
    run_before_key: bool = True
    slot_0_references_nothing: bool = True
    refuse_condemned: bool = True
    generations: bool = True
    recheck: bool = True
    exact_slot: bool = True
    held_only: bool = True
    by_parts: bool = True
    relocation_checks: bool = True
    one_slot: bool = True
    places_with_commits: bool = True
    publish_before_list: bool = True
    every_run: bool = True
    forgotten_by_name: bool = True
    ended_first: bool = True
    all_marked: bool = True
    shard_of_keys: bool = True
    remark: bool = True
    replay_reaches_mark: bool = True
    mark_of_this_epoch: bool = True
    spare_the_live: bool = True
    names_kept: bool = True
    freed_marked: bool = True
    undrop_adopts: bool = True
    undrop_looks: bool = True
    store_clock: bool = True
    same_hide: bool = True


KEPT = Rules()


@dataclass(frozen=True)
class Writer:
    """Names manifests in a run, by W1 to W4.

    A save, a promotion, an undone eviction, a fork and a sync are the same writer in different
    situations: a promotion finds its manifest live in its own run, an undo finds it evicted, a fork
    and a sync create their run.

    Attributes:
        who: Its name in a trace.
        run: The run whose log it writes.
        manifests: What it names, all in one slot.
        name: As what.
        born: Whether it creates the run.
        own: Whether it makes use of W2a.
        passing: A manifest that it names and evicts in the same slot, without a place: a sync of
            what the source has evicted and collected since.
        undrops: Whether it takes a drop back: of a run that is not freed by the commit alone.
        early: Whether it lists the objects, to use some of them again, before it observes its
            epoch; until it has chosen a first file it does not list them again.
    """

    who: str
    run: int
    manifests: tuple[int, ...] = (0,)
    name: int = CHECKPOINT
    born: bool = False
    own: bool = False
    passing: int | None = None
    undrops: bool = False
    early: bool = False


@dataclass(frozen=True)
class Relocate:
    """Moves a live manifest to another file: a slot with a `place` line only, under W1 to W4.

    Attributes:
        who: Its name in a trace.
        run: The run whose log it writes.
        file: The file that replaces those of the manifest.
        manifest: Which is moved.
    """

    who: str
    run: int
    file: int
    manifest: int = 0
    own: bool = False


@dataclass(frozen=True)
class Evict:
    """Evicts names of a manifest in a run; `drop`: drops the run."""

    who: str
    run: int
    manifest: int = 0
    name: int = CHECKPOINT
    drop: bool = False


@dataclass(frozen=True)
class Thin:
    """Thins a manifest in a run: a slot with a place of some of its files, under their keys.

    It names nothing that the place before does not name, so W2a covers all of it.
    """

    who: str
    run: int
    manifest: int = 0
    keeps: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Spoil:
    """Puts a file into the folder of a run that no collector can read, and takes it away again."""

    who: str
    run: int


@dataclass(frozen=True)
class Forget:
    """Gives up a run that cannot be read: ends its log, then records that in an epoch."""

    who: str
    run: int


@dataclass(frozen=True)
class Hide:
    """Drops a run so that it can be taken back, `times` times."""

    who: str
    run: int
    times: int = 1


@dataclass(frozen=True)
class Free:
    """Frees a hidden run: finds that its delay has passed, later puts the line.

    The step in which the store's clock passes the delay is this actor's, too.
    """

    who: str
    run: int


@dataclass(frozen=True)
class Collector:
    """Performs one sweep, G1 to G5: its own, or an existing one, finished or not."""

    who: str


Actor = Writer | Relocate | Evict | Thin | Spoil | Forget | Hide | Free | Collector


@dataclass(frozen=True)
class Scenario:
    """The actors, and the first state.

    Attributes:
        actors: Each may stop for ever at any step.
        runs: For each run the manifests that it holds at first; `None` if it does not exist yet.
        files: For each manifest the files that it needs.
        epochs: Sweeps that may be published.
        crowd: Besides the actors there are any number of collectors, at any point of any sweep.
        strangers: Writers that are not modelled may put any file at any time, under an epoch
            that they once observed; their puts may land late and again.
        apart: Reading a log's head is a step of its own; otherwise it is one step with the put
            that follows (`writers.py` says why that is the same).
    """

    actors: tuple[Actor, ...]
    runs: tuple[tuple[int, ...] | None, ...] = ((0,),)
    files: tuple[tuple[int, ...], ...] = ((0,),)
    epochs: int = 1
    crowd: bool = False
    strangers: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        assert not (self.crowd and self.apart), "a crowd has no memory to read anything into"


#: For each epoch its condemned keys, and the runs that existed when it was published.
Epochs = tuple[tuple[int, int], ...]


class State(NamedTuple):
    """The state of the store and of the actors.

    Attributes:
        objects: Keys that exist, as bits.
        deleting: Keys whose DELETE has been sent: it may land at any time, any number of times.
        epochs: Those that are published.
        logs: Of each run; `None` before its slot 0.
        memory: The memory of each actor: `Memory` of `writers` or of `collectors`.
        forgotten: Keys that were deleted; if they exist again, a broken rule lets them be named.
    """

    objects: int
    deleting: int
    epochs: Epochs
    logs: tuple[Log | None, ...]
    memory: tuple[Any, ...]
    forgotten: int = 0


__all__ = [
    "CHECKPOINT",
    "KEPT",
    "PIN",
    "Actor",
    "Collector",
    "Evict",
    "Forget",
    "Free",
    "Hide",
    "Relocate",
    "Rules",
    "Scenario",
    "Spoil",
    "State",
    "Thin",
    "Writer",
]
