"""The first save after a resume: whether generators and loaders are where they should be.

What a training run draws between two saves is unknown, so only what can be proven is warned of:
generators that nobody restored, and a loader of torchdata's that started from its beginning, or
that drew random numbers behind `holdfast.rng.restore`.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.registry.face import rng
from holdfast.registry.face.batches import Batches, Position, length_of, position_of

_LOGGER = logging.getLogger("holdfast")
_Path = tuple[str, ...]


def check_after(restored: object, at: int, ref: str) -> Callable[[object, int], None]:
    """Return the check of the first save after a checkpoint was restored; it never raises."""
    captured = dict[_Path, list[Mapping[str, Any]]]()
    positions = dict[_Path, Position]()
    for path, part in _parts(restored):
        if (position := position_of(part)) is not None:
            positions[path] = position
        elif rng.is_capture(part):
            captured.setdefault(path, []).append(part)

    def check(state: object, step: int) -> None:
        if not captured and not positions:
            return
        try:
            now = dict(_parts(state))
            drawn = [one for several in captured.values() for one in several]
            for path, several in captured.items():
                _check_generators(path, several, now.get(path), ref)
            for path, position in positions.items():
                _check_loader(path, position, at, now.get(path), step, drawn)
        except Exception as error:  # the save itself refuses a state that is odd
            _LOGGER.debug("%s: not compared with the save after it: %s", ref, error)

    return check


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
    path: _Path, saved: Position, at: int, now: object, step: int, drawn: list[Mapping[str, Any]]
) -> None:
    """Warn if a loader that its program saves by itself did not continue."""
    position, steps = position_of(now), step - at
    if position is None or saved.is_finished or steps <= 0:
        return
    iterators = list(_iterators(position.batches))
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
    elif kind.__module__.partition(".")[0] in ("torchdata", "accelerate"):
        yield path, state.state_dict() if hasattr(state, "state_dict") else None
    elif isinstance(state, Mapping):
        yield path, state
        if rng.is_capture(state) or position_of(state) is not None:
            return
        is_of_batches = {
            "rng",
            "epoch",
            "loader",
        } == state.keys()  # which compares its loader itself
        for key, value in state.items():
            if not (is_of_batches and key == "loader"):
                yield from _parts(value, (*path, key) if isinstance(key, str) else path)
    elif kind in (list, tuple):
        for value in state:  # type: ignore[attr-defined]
            yield from _parts(value, path)


def _iterators(batches: int) -> Iterator[Any]:
    """Yield the iterators of torchdata's in this process that are at a batch, or one ahead."""
    module = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    kind = getattr(module, "_StatefulBaseDataLoaderIter", None)
    if kind is not None:
        for one in gc.get_objects():
            if issubclass(type(one), kind) and one._num_yielded in (batches, batches + 1):
                yield one


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
