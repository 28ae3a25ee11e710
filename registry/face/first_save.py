"""The first saves after a resume: whether generators and loaders are where they should be.

What a training run draws between two saves is unknown, so only what can be proven is warned of:
generators that nobody restored; a model that was made behind `holdfast.rng.restore`; a loader of
torchdata's that started from its beginning, or that drew random numbers behind that restore; and a
loader without a position that started from its beginning, within an epoch.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.registry.errors import NotFound
from holdfast.registry.face import rng
from holdfast.registry.face.batches import Batches, Position, length_of, parts_of, position_of

_LOGGER = logging.getLogger("holdfast")
#: How many saves are compared: some proofs need two that lie in one epoch.
_SAVES = 4
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_Path = tuple[str, ...]


class FirstSaves:
    """The first saves after a checkpoint was restored; a call compares one, and never raises.

    `restored` is its state or, if the program was given none, what loads the state below a path.
    """

    def __init__(self, restored: object, at: int, ref: str) -> None:
        self._load: Callable[[str], object] | None = restored if callable(restored) else None
        self._at, self._ref, self._saves = at, ref, 0
        self._captured = dict[_Path, list[Mapping[str, Any]]]()
        self._positions = dict[_Path, Position]()
        if self._load is None:
            self._note(restored)
        self._loader, self._model = _PlainLoader(at), _MadeModel()

    def __call__(self, state: object, step: int) -> bool:
        """Compare a save; return whether it is the last one to compare."""
        self._saves += 1
        is_exact = False  # who keeps no generators does not expect the same bits
        try:
            now = dict(_parts(state))
            is_exact = any(map(rng.is_capture, now.values()))
            kind = None  # a look through all objects takes long
            if is_exact or any(position_of(part) is not None for part in now.values()):
                kind = _kind("torch.utils.data.dataloader", "_BaseDataLoaderIter")
            iterators = [one for one in _instances(kind) if one._num_yielded]
            if self._saves == 1:
                self._compare_first(now, step, iterators)
            if is_exact:
                self._loader.compare(step, iterators)
                self._model.compare(now)
        except Exception as error:  # the save itself refuses a state that is odd
            _LOGGER.debug("%s: not compared with a save after it: %s", self._ref, error)
        is_last = self._saves == _SAVES or not is_exact
        if is_last:
            self._model.end()
        return is_last

    def _note(self, restored: object) -> None:
        """Keep of a state what the first save is compared with."""
        for path, part in _parts(restored):
            if (position := position_of(part)) is not None:
                self._positions[path] = position
            elif rng.is_capture(part):
                self._captured.setdefault(path, []).append(part)

    def _compare_first(self, now: Mapping[_Path, object], step: int, iterators: list[Any]) -> None:
        if self._load is not None:
            self._note_loaded(now, self._load)
        drawn = [one for several in self._captured.values() for one in several]
        for path, several in self._captured.items():
            _check_generators(path, several, now.get(path), self._ref)
        for path, position in self._positions.items():
            _check_loader(path, position, self._at, now.get(path), step, drawn, iterators)

    def _note_loaded(self, now: Mapping[_Path, object], load: Callable[[str], object]) -> None:
        """Load what the program, which filled its tensors only, should have restored too."""
        found = {path: position_of(part) is not None for path, part in now.items()}
        found = {path: has for path, has in found.items() if has or rng.is_capture(now[path])}
        if self._model.is_restored and not any(found.values()):
            return  # it has the generators from there
        for path in found:
            for end in range(len(path), 0, -1):  # the parts of ranks are in a list
                try:
                    self._note(load("/".join(path[:end])))
                    break
                except NotFound:
                    continue


class _PlainLoader:
    """Tells a training that saves within an epoch of a loader without a position, and resumed so.

    The loader began at its first batch, and the loop took more batches behind a save.
    """

    def __init__(self, at: int) -> None:
        self._at = at
        self._seen: tuple[int, Mapping[str, Any], int, int] | None = None

    def compare(self, step: int, iterators: list[Any]) -> None:
        seen, self._seen = self._seen, None
        if seen is not None:
            saved, iterator, taken, length = seen
            if iterator["_num_yielded"] - taken == min(step - saved, length - taken):
                _LOGGER.warning(
                    "a resume is not bit for bit: step %d was saved within an epoch of a "
                    "DataLoader whose position is in no state, and this resume, at step %d, began "
                    "an epoch; holdfast.rng.Batches continues one of torchdata's",
                    saved,
                    self._at,
                )
                self._at = 0
        if step > self._at > 0:
            plain = [
                one
                for one in iterators
                if not issubclass(type(one), _kind(_STATEFUL, "_StatefulBaseDataLoaderIter"))
                and one._num_yielded < (length_of(one._index_sampler) or 0)
            ]
            self._seen = self._begun(step, *plain) if len(plain) == 1 else None

    def _begun(self, step: int, iterator: Any) -> tuple[int, Mapping[str, Any], int, int] | None:
        """Return an iterator that began an epoch at the resume, if each step took one batch."""
        sampler = iterator._index_sampler
        length, parts = len(sampler), [one for _, one in parts_of(sampler)]
        if self._at % length == 0 or not all(map(_skips_nothing, parts)):
            return None
        is_ahead = any(
            one.base_dataloader.batch_sampler is sampler
            for one in _instances(_kind("accelerate.data_loader", "DataLoaderShard"))
        )
        taken = (step - self._at - 1) % length + 1 + is_ahead
        if iterator._num_yielded != taken:
            return None
        return step, vars(iterator), taken, length  # the dict outlives it, and keeps no worker


class _MadeModel:
    """Tells a training whose model was made behind `rng.restore`, and drew random numbers there.

    Two saves have the model: it is not one that the loop makes again and again.
    """

    def __init__(self) -> None:
        self._begun = self._restores = rng.restores()
        self._tensors = list[weakref.ref[Any]]()  # that modules were given since the last restore
        self._before: Any = None  # the generator's state at the newest of them
        self._has_drawn = False
        self._saved = dict[_Path, list[weakref.ref[Any]]]()
        act = weakref.WeakMethod(self._registered)

        def registered(module: object, name: str, tensor: Any) -> None:
            is_new = tensor is not None and getattr(module, name, None) is not tensor  # not by +=
            if is_new and (own := act()) is not None:
                own(tensor)

        module = sys.modules.get("torch.nn.modules.module")
        kinds = () if module is None else ("parameter", "buffer")
        hooks = [getattr(module, f"register_module_{one}_registration_hook") for one in kinds]
        self._ends = [weakref.finalize(self, hook(registered).remove) for hook in hooks]

    @property
    def is_restored(self) -> bool:
        """Whether the program has restored generators since the checkpoint came back."""
        return rng.restores() != self._begun

    def end(self) -> None:
        """Watch no longer which modules are made."""
        for end in self._ends:
            end()

    def compare(self, now: Mapping[_Path, object]) -> None:
        before, self._saved = self._saved, {}
        if not self._has_drawn or self._restores != rng.restores():
            return
        alive = (ref() for ref in self._tensors)
        made = {one.data_ptr(): one for one in alive if one is not None and one.numel()}
        for path, part in now.items():
            tensors = _tensors(part)
            found = [made[at] for one in tensors if (at := one.data_ptr()) in made]
            if len(found) * 2 <= len(tensors):  # a model that grows has older parts
                continue
            earlier = before.get(path, [])
            if earlier and {id(ref()) for ref in earlier} <= {id(one) for one in found}:
                _LOGGER.warning(
                    "this resume is not bit for bit: the model at %s was made behind "
                    "holdfast.rng.restore(), and drew random numbers; make it before, or iterate "
                    "over holdfast.rng.Batches, which restores behind all draws",
                    "/".join(path),
                )
                self._has_drawn = False
                return
            self._saved[path] = [weakref.ref(one) for one in found]

    def _registered(self, tensor: Any) -> None:
        """Note a tensor that a module was given."""
        if not self.is_restored:
            return
        torch, restores = sys.modules["torch"], rng.restores()
        if restores != self._restores:  # what was made before is before the restore
            self._restores, self._before, self._has_drawn = restores, None, False
            self._tensors.clear()
        if not self._has_drawn:
            now = (torch.cuda if tensor.is_cuda else torch).get_rng_state()
            self._has_drawn = self._before is not None and not torch.equal(now, self._before)
            self._before = now
        self._tensors.append(weakref.ref(tensor))


def _check_generators(path: _Path, saved: list[Mapping[str, Any]], now: object, ref: str) -> None:
    if not rng.is_capture(now) or any(
        rng.times_restored(one) or rng.is_same(one, now) for one in saved
    ):
        return
    _LOGGER.warning(
        "this resume is not bit for bit: the generators of %s at %s were not restored; call "
        "holdfast.rng.restore() with them before the first step",
        ref,
        "/".join(path),
    )


def _check_loader(
    path: _Path,
    saved: Position,
    at: int,
    now: object,
    step: int,
    drawn: list[Mapping[str, Any]],
    iterators: list[Any],
) -> None:
    """Warn if a loader that its program saves by itself did not continue."""
    position, steps = position_of(now), step - at
    if position is None or saved.is_finished or steps <= 0:
        return
    kind, batches = _kind(_STATEFUL, "_StatefulBaseDataLoaderIter"), position.batches
    iterators = [one for one in iterators if issubclass(type(one), kind)]
    # Accelerate's is one ahead.
    iterators = [one for one in iterators if one._num_yielded in (batches, batches + 1)]
    if len(iterators) != 1:
        return
    (iterator,) = iterators
    why = None
    if position.batches - saved.batches == steps and iterator._base_seed in _first_draws(drawn):
        why = (
            "it began behind holdfast.rng.restore(), and drew a random number that an unbroken "
            "training run does not draw there"
        )
    elif (length := length_of(iterator._index_sampler)) and (at - saved.batches) % length == 0:
        # One batch a step until then: the position tells whether it is still so.
        begun, continued = ((one - 1) % length + 1 for one in (steps, saved.batches + steps))
        if position.batches == begun != continued:
            why = (
                f"it is at batch {begun} after {steps} steps, and began at its first batch instead "
                f"of behind batch {saved.batches}"
            )
    if why is not None:
        _LOGGER.warning(
            "this resume is not bit for bit: the loader at %s: %s; holdfast.rng.Batches does both "
            "in the right order",
            "/".join(path),
            why,
        )


def _parts(state: object, path: _Path = ()) -> Iterator[tuple[_Path, object]]:
    """Yield each mapping of a state with its path, in which the numbers of ranks do not count."""
    kind = type(state)
    if isinstance(state, Batches):
        yield (*path, "rng"), rng.capture()
    elif kind.__name__ == "PerRank":
        yield from _parts(getattr(state, "value", None), path)
    elif hasattr(kind, "named_parameters"):
        yield path, dict(state.named_parameters())  # type: ignore[attr-defined]
    elif kind.__module__.partition(".")[0] in ("torchdata", "accelerate"):
        yield path, state.state_dict() if hasattr(state, "state_dict") else None
    elif isinstance(state, Mapping):
        yield path, state
        if rng.is_capture(state) or position_of(state) is not None:
            return
        # Which compares its loader itself.
        is_of_batches = state.keys() == {"rng", "epoch", "loader"}
        for key, value in state.items():
            if not (is_of_batches and key == "loader"):
                yield from _parts(value, (*path, key) if isinstance(key, str) else path)
    elif kind in (list, tuple):
        for value in state:  # type: ignore[attr-defined]
            yield from _parts(value, path)


def _tensors(part: object) -> list[Any]:
    """Return the tensors in a mapping of the state."""
    torch = sys.modules["torch"]
    values = part.values() if isinstance(part, Mapping) else ()
    return [one for one in values if isinstance(one, torch.Tensor) and one.numel()]


def _skips_nothing(sampler: Any) -> bool:
    """Return whether a sampler, or what holds one, is known to begin at its first batch."""
    library = type(sampler).__module__.partition(".")[0]
    return library in ("torch", "accelerate") and not hasattr(sampler, "skip_batches")


def _kind(module: str, name: str) -> Any:
    """Return a class; an empty tuple if its module is not imported."""
    return getattr(sys.modules.get(module), name, ())


def _instances(kind: Any) -> list[Any]:
    """Return the objects of a class that this process has."""
    if not kind:
        return []
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    known = frozenset(kinds)  # a process has millions of objects
    return [one for one in gc.get_objects() if type(one) in known]


def _first_draws(drawn: list[Mapping[str, Any]]) -> set[int]:
    """Return the numbers that loaders draw from torch's generators right behind a restore."""
    torch = sys.modules["torch"]
    found = set[int]()
    # What was restored twice was restored behind the loader's start, too.
    once = [one for one in drawn if rng.times_restored(one) == 1]
    for state in (value for one in once for value in rng.of_torch(one)):
        generator = torch.Generator()
        generator.set_state(state.cpu())
        for _ in range(2):  # a sampler's seed may be drawn before the loader's
            found.add(int(torch.empty((), dtype=torch.int64).random_(generator=generator)))
    return found
