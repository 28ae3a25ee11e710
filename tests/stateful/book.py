"""The model: the states that the runs of a registry hold, derived from their commits.

For each run a dict of refs with the states that they must load as. It folds commit by commit into
dicts and lists and shares nothing with `holdfast.registry.history.replay` but the parsing of lines;
which objects that takes it learns from the places and the placements themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from holdfast.registry.curation.streams.segments import unpack_entries
from holdfast.registry.history import actions
from holdfast.registry.history.actions import Commit, Free, Mark, Place
from holdfast.registry.history.replay import Slot
from holdfast.registry.loading.state_handle import StateHandle
from holdfast.registry.loading.stored import Stored
from holdfast.registry.objects.keys import RUNS, slot_key
from holdfast.registry.objects.placement import Placement
from holdfast.registry.store.store import Store
from holdfast.registry.values.digest import Digest
from tests.stateful.contents import known_states
from tests.stateful.world import Shelf
from tests.support.states import same

Entries = list[dict[str, Any]]


@dataclass
class Kept:
    """A checkpoint."""

    manifest: Digest
    phase: str
    step: int
    companions: dict[str, Digest]
    streams: dict[str, tuple[Entries, int]]  # what each held, and its archives so far
    is_superseded: bool = False
    is_evicted: bool = False
    parts: tuple[str, ...] | None = None  # what is left, if it was thinned

    @property
    def is_live(self) -> bool:
        return not self.is_superseded and not self.is_evicted


@dataclass
class History:
    """A stream: its entries, and the states with how many entries of each it has."""

    lifetime: str
    segments: list[tuple[Digest, int, int]] = field(default_factory=list)
    entries: Entries = field(default_factory=list)
    archives: dict[str, tuple[list[tuple[Digest, int, int]], Entries]] = field(default_factory=dict)


class RunBook:
    """The model of a run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots = 0
        self.commits: list[bytes] = []
        self.spec: Any = None
        self.parent: str | None = None
        self.checkpoints: dict[int, Kept] = {}
        self.pins: dict[tuple[str, str], tuple[Digest, Digest | None, int | None]] = {}
        self.release: str | None = None
        self.pool: dict[int, Digest] = {}
        self.streams: dict[str, History] = {}
        self.is_dropped = self.is_freed = False
        self.places: dict[Digest, Place] = {}
        self.epoch = 0

    def refs(self) -> dict[str, Digest]:
        """Return every ref that must load, with the id of its state; streams are not among them."""
        return {} if self.is_dropped else self._everything()

    def _everything(self) -> dict[str, Digest]:
        found = {}
        for n, kept in self.checkpoints.items():
            if not kept.is_evicted:
                found[f"commits/{n}"] = kept.manifest
                for name, digest in kept.companions.items():
                    found[f"commits/{n}/companions/{name}"] = digest
        for (kind, name), (digest, card, _) in self.pins.items():
            found[f"{kind}s/{name}"] = digest
            if card is not None:
                found[f"{kind}s/{name}/card"] = card
        return found | {f"pool/v{version:04d}": digest for version, digest in self.pool.items()}

    def held(self) -> set[Digest]:
        """Return the id of every state that the run needs."""
        if self.is_freed:
            return set()
        found = set(self._everything().values())
        for stream in self.streams.values():
            segments = [*stream.segments]
            for archived, _ in stream.archives.values():
                segments += archived
            found |= {digest for digest, *_ in segments}
        return found

    def part_of(self, ref: str) -> tuple[str, ...] | None:
        """Return the components that a ref has; `None`: all of them."""
        match ref.split("/"):
            case ["commits", n]:
                return self.checkpoints[int(n)].parts
        return None

    def parts(self) -> dict[Digest, frozenset[str] | None]:
        """Return the components of each state that the run needs; `None`: all of them."""
        found: dict[Digest, frozenset[str] | None] = dict.fromkeys(self.held())
        refs, thinned = self._everything(), dict[Digest, frozenset[str]]()
        for ref, digest in refs.items():
            if (part := self.part_of(ref)) is not None:
                thinned[digest] = thinned.get(digest, frozenset()) | {*part}
        # A tag and a gate name a checkpoint, and have what it has; nothing else shares its parts.
        whole = {
            digest
            for ref, digest in refs.items()
            if self.part_of(ref) is None and not self._names_thinned(ref)
        }
        return found | {one: of for one, of in thinned.items() if one in found and one not in whole}

    def _names_thinned(self, ref: str) -> bool:
        kind, _, name = ref.partition("/")
        n = self.pins[kind[:-1], name][2] if kind in ("tags", "gates") else None
        return n is not None and self.checkpoints[n].parts is not None

    def live(self) -> dict[int, Kept]:
        """Return the checkpoints of the current line of training that are kept, by commit."""
        kept = {} if self.is_dropped else self.checkpoints
        return {n: one for n, one in kept.items() if one.is_live}

    def next_step(self) -> int:
        return max((kept.step for kept in self.checkpoints.values()), default=0) + 1


class Book:
    """The model of a registry.

    Attributes:
        shelf: Its store.
        runs: The runs.
        truths: States by id; shared by registries, for an id is the same in all of them.
    """

    def __init__(self, shelf: Shelf, store: Store, truths: dict[Digest, Any]) -> None:
        self.shelf = shelf
        self.runs: dict[str, RunBook] = {}
        self.truths = truths
        self._store = store
        self._packs: dict[Any, frozenset[str]] = {}

    def read(self) -> None:
        """Read every log to its head, and load whatever is newly held there."""
        names = {key.split("/")[1] for key in self._keys(RUNS)}
        for name in sorted(names):
            run = self.runs.setdefault(name, RunBook(name))
            before = run.parts()
            moved: set[Digest] = set()
            while (key := slot_key(name, run.slots)) in self.shelf:
                slot = Slot.decode(run.slots, self.shelf.get(key), where=key)
                self._fold(run, slot)
                moved |= {line.manifest for _, line in slot.lines if isinstance(line, Place)}
            held = run.parts()
            for digest in sorted(held):
                if digest in moved or digest not in before or held[digest] != before[digest]:
                    self._check_loads(run, digest)

    def _keys(self, prefix: str) -> Iterator[str]:
        return (info.key for info in self.shelf.list(prefix))

    def _fold(self, run: RunBook, slot: Slot) -> None:
        run.slots += 1
        for raw, line in slot.lines:
            match line:
                case Commit():
                    run.commits.append(raw)
                    for action in line.actions:
                        self._apply(run, line.n, action)
                case Place():
                    run.places[line.manifest] = line
                    spoken = {str(key) for key in self.needs(line)}
                    assert not spoken & self.shelf.issued, (
                        f"{run.name} names what was condemned: {spoken & self.shelf.issued}"
                    )
                case Free():
                    run.is_freed = True
                case Mark():
                    run.epoch = max(run.epoch, line.epoch)

    def _apply(self, run: RunBook, n: int, action: Any) -> None:
        match action:
            case actions.CreateRun():
                run.spec = action.spec
                run.parent = action.parent and action.parent.run
            case actions.AddCheckpoint():
                marks = {
                    name: (stream.entries, len(stream.archives))
                    for name, stream in run.streams.items()
                }
                run.checkpoints[n] = Kept(
                    action.manifest, action.phase, action.step, action.companions or {}, marks
                )
            case actions.Evict():
                for eviction in action.evictions:
                    run.checkpoints[eviction.checkpoint].is_evicted = True
            case actions.Recover():
                for number in action.checkpoints:
                    back = run.checkpoints[number]
                    # What was thinned and then evicted comes back thinned.
                    back.parts = back.parts if back.is_evicted else None
                    back.is_evicted = False
            case actions.Thin():
                for thinning in action.thinnings:
                    run.checkpoints[thinning.checkpoint].parts = thinning.keep
            case actions.Rewind():
                self._rewind(run, action.to)
            case actions.SetTag():
                kept = run.checkpoints[action.checkpoint]
                run.pins["tag", action.name] = (kept.manifest, None, action.checkpoint)
            case actions.RemoveTag():
                del run.pins["tag", action.name]
            case actions.SetPin():
                pin = (action.manifest, action.card, action.checkpoint)
                run.pins[action.kind, action.name] = pin
                if action.kind == "release":
                    run.release = action.name
            case actions.PointRelease():
                run.release = action.version
            case actions.Promote():
                run.pool[action.version] = action.manifest
            case actions.EvictEntries():
                for version in action.versions:
                    del run.pool[version]
            case actions.AppendStream():
                self._append(run, action)
            case actions.ArchiveStream():
                stream = run.streams[action.stream]
                stream.archives[action.label] = (stream.segments, stream.entries)
                stream.segments, stream.entries = [], []
            case actions.HideRun():
                run.is_dropped = True
            case actions.UndropRun():
                run.is_dropped = run.is_freed = False

    def _rewind(self, run: RunBook, to: int | None) -> None:
        kept = -1 if to is None else to
        for n, checkpoint in run.checkpoints.items():
            checkpoint.is_superseded = checkpoint.is_superseded or n > kept
        marks = {} if to is None else run.checkpoints[to].streams
        for name, stream in run.streams.items():
            stream.entries, archives = marks.get(name, ([], 0))
            count, archived = len(stream.entries), [*stream.archives.values()]
            # Merged since, entries lie in other states than they did.
            segments = archived[archives][0] if archives < len(archived) else stream.segments
            stream.segments = [
                (digest, start, min(size, count - start))
                for digest, start, size in segments
                if start < count
            ]

    def _append(self, run: RunBook, action: actions.AppendStream) -> None:
        stream = run.streams.setdefault(action.stream, History(action.lifetime))
        if action.manifest not in self.truths:
            self.truths[action.manifest] = self._stored(run, action.manifest).load()
        loaded = unpack_entries(self.truths[action.manifest], 0, action.count)
        replaced = stream.entries[action.start :]
        assert same(loaded[: len(replaced)], replaced), f"{run.name}: a merge changed entries"
        stream.entries = [*stream.entries[: action.start], *loaded]
        before = [
            (digest, start, min(size, action.start - start))
            for digest, start, size in stream.segments
            if start < action.start
        ]
        stream.segments = [*before, (action.manifest, action.start, action.count)]

    def _stored(self, run: RunBook, digest: Digest) -> Stored:
        log: Any = SimpleNamespace(
            run_id=run.name,
            state=SimpleNamespace(by_manifest=run.places),
            place_of=run.places.get,
            refresh=lambda: None,
        )
        return Stored(StateHandle(self._store, log, digest, digest.short))

    def _check_loads(self, run: RunBook, digest: Digest) -> None:
        parts = run.parts()[digest]
        loaded = self._stored(run, digest).load(only=None if parts is None else sorted(parts))
        assert same(loaded, cut_to(self.truth(digest), parts)), f"{run.name}: {digest.short}"

    def needs(self, place: Place) -> frozenset[str]:
        """Return the objects that a placed state needs."""
        key = place.placement_key
        if key not in self._packs:
            placement = Placement.decode(self.shelf.get(str(key)), key.digest, where=str(key))
            self._packs[key] = frozenset(str(pack.key) for pack in placement.packs)
        return self._packs[key] | {str(key), str(place.manifest_key)}

    def needed(self) -> dict[str, str]:
        """Return every object that something live needs, with one such thing."""
        found: dict[str, str] = {}
        for name, run in self.runs.items():
            for digest in run.held():
                for key in self.needs(run.places[digest]):
                    found[key] = f"{name}/{digest.short}"
        return found

    def truth(self, digest: Digest) -> Any:
        """Return the state of an id."""
        return self.truths.get(digest) or known_states()[digest]

    def check(self) -> None:
        """Check that everything live is there, and that no delete is on its way to it."""
        needed = self.needed()
        gone = {key: ref for key, ref in needed.items() if key not in self.shelf}
        assert not gone, f"gone, and needed: {gone}"
        deleting = {key: needed[key] for key in needed.keys() & self.shelf.issued}
        assert not deleting, f"a delete is on its way to what is needed: {deleting}"


def cut_to(state: Any, parts: Collection[str] | None) -> Any:
    """Return a state with only some components."""
    return state if parts is None else {name: state[name] for name in state if name in parts}
