"""The conditions that must hold after every step of a schedule, and at its end.

After every step: every state that a run holds by its log loads, every byte hashed, and equals the
saved one. The log is read directly, slot by slot; a state that was found sound is not checked
again.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.backends import Backend
from holdfast.registry.errors import RegistryError
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import Place
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.loading.state_handle import StateHandle
from holdfast.registry.objects.keys import KINDS, ObjectKey, slot_key
from holdfast.registry.objects.manifest import Manifest
from holdfast.registry.objects.pack import open_pack
from holdfast.registry.objects.placement import Placement
from holdfast.registry.store.fetching import verify_pack_chunks
from holdfast.registry.writing.object_writer import placed_keys
from tests.schedules.store import World
from tests.support.inline import without_threads
from tests.support.states import same

#: Says what the checkpoint of a run at a step was saved with.
Content = Callable[[str, int], object]


class Violation(AssertionError):
    """A condition does not hold.

    Attributes:
        moves: The schedule that leads there.
        calls: What each move did.
    """

    moves: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = "\n  ".join([super().__str__(), *self.calls])
        return f"{shown}\nschedule: {' '.join(self.moves)}"


class Soundness:
    """Looks at worlds of one scenario; remembers what it has seen.

    Args:
        content: What each checkpoint was saved with.
    """

    def __init__(self, content: Content) -> None:
        self._content = content
        self._sound: set[int] = set()
        self._replays: dict[tuple[object, bytes], _Replay] = {}
        self._verified: set[tuple[str, bytes]] = set()
        self.loads = 0

    def check(self, world: World) -> None:
        """Check that everything that is held is there, whole and the right thing.

        Raises:
            Violation: It is not.
        """
        if world.mark in self._sound:
            return
        for run_id in runs_of(world):
            replay = self._replay(world, run_id)
            for place in replay.places:
                self._check_placed(world, run_id, place)
            if not replay.loaded:
                # Of the same log and the same objects the next world would load the same.
                self._load_all(world, replay.state)
                replay.loaded = True
        self._sound.add(world.mark)

    def live_objects(self, world: World) -> set[str]:
        """Return the keys of every object that some run needs."""
        return {
            str(key)
            for run_id in runs_of(world)
            for place in self._replay(world, run_id).places
            for key in placed_keys(place, _placement(world, place))
        }

    def state(self, world: World, run_id: str) -> RunManifest:
        """Return a run as its log has it."""
        return self._replay(world, run_id).state

    def _replay(self, world: World, run_id: str) -> _Replay:
        replay = self._replays.setdefault((run_id, b""), _Replay(RunManifest(run_id=run_id)))
        while True:
            key = slot_key(run_id, replay.state.next_slot)
            found = world.objects.get(key)
            if found is None:
                return replay
            known = self._replays.get((id(replay), found.data))
            if known is None:
                slot = Slot.decode(replay.state.next_slot, found.data, where=key)
                known = _Replay(advance(replay.state, [slot]))
                self._replays[(id(replay), found.data)] = known
            replay = known

    def _check_placed(self, world: World, run_id: str, place: Place) -> None:
        for key in (place.manifest_key, place.placement_key):
            self._check_object(world, run_id, key)
        for pack in _placement(world, place).packs:
            self._check_object(world, run_id, pack.key)

    def _check_object(self, world: World, run_id: str, key: ObjectKey) -> None:
        found = world.objects.get(str(key))
        if found is None:
            raise Violation(f"{run_id} holds what needs {key}, and that is gone")
        if (str(key), found.data) not in self._verified:
            try:
                _verify(key, found.data)
            except RegistryError as error:
                raise Violation(f"{run_id} holds what needs {key}: {error}") from error
            self._verified.add((str(key), found.data))

    def _load_all(self, world: World, state: RunManifest) -> None:
        """Load whatever a run holds by the public surface."""
        self.loads += 1
        registry = opened(world.backend())
        log = RunLog(registry.handle.store, state.run_id)
        log.open()
        try:
            for digest in state.held:
                StateHandle(registry.handle.store, log, digest, "held").load()
            for found in registry.run(state.run_id).checkpoints():
                expected = self._content(state.run_id, found.step)
                if not same(found.load(), expected):
                    raise Violation(f"{found.ref} loads as something else than was saved")
        except RegistryError as error:
            raise Violation(f"what {state.run_id} holds does not load: {error}") from error


class _Replay:
    """A run at one slot.

    Attributes:
        state: The run.
        places: The places of the states that it holds.
        loaded: Whether all of that was loaded once.
    """

    def __init__(self, state: RunManifest) -> None:
        self.state = state
        self.places = [state.by_manifest[digest] for digest in state.held]
        self.loaded = False


def _verify(key: ObjectKey, data: bytes) -> None:
    """Hash every byte of an object."""
    where = str(key)
    if key.kind == "manifests":
        Manifest.decode(data, key.digest, where=where)
    elif key.kind == "placements":
        Placement.decode(data, key.digest, where=where)
    else:
        verify_pack_chunks(data, open_pack(data, key.digest, where=where), key)


_placements: dict[bytes, Placement] = {}


def _placement(world: World, place: Place) -> Placement:
    data = world.objects[str(place.placement_key)].data
    if data not in _placements:
        _placements[data] = Placement.decode(data, place.placement, where="placement")
    return _placements[data]


def runs_of(world: World) -> list[str]:
    """Return the names of the runs, as their slots have them."""
    return sorted({key.split("/")[1] for key in world.objects if key.startswith("runs/")})


def objects_of(world: World) -> set[str]:
    """Return the keys of packs, manifests and placements."""
    return {key for key in world.objects if key.startswith(KINDS)}


def opened(backend: Backend) -> Registry:
    """Open a registry with nothing remembered and no threads."""
    return without_threads(open_on(backend))
