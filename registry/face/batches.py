"""The batches of a loader: its position and the random generators as one part of a state.

A loader draws random numbers when it begins, at `iter` or at the first batch. A resume begins one
that an unbroken training began long before, so the generators are restored behind those draws.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import isgenerator
from itertools import islice
from typing import Any

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.face import rng

_LOGGER = logging.getLogger("holdfast")
_END = object()
#: Loops without a loader: an item is found by its number alone.
_NUMBERED = (range, list, tuple)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a loader of torchdata's within an epoch."""

    batches: int
    is_finished: bool  # whether its loop over the epoch has ended


def position_of(state: object) -> Position | None:
    """Return the position that a loader's state has, if torchdata made it."""
    if not isinstance(state, Mapping) or "_iterator_finished" not in state:
        return None
    batches = state.get("_num_yielded")
    if batches is None:  # with workers
        snapshot, since = state.get("_snapshot"), state.get("_steps_since_snapshot")
        step = snapshot.get("_snapshot_step") if isinstance(snapshot, Mapping) else None
        batches = step + since if isinstance(step, int) and isinstance(since, int) else None
    return Position(batches, bool(state["_iterator_finished"])) if type(batches) is int else None


class Batches:
    """Iterates over a loader, once for each epoch: `for batch in batches`. It is part of the state.

    The state has the loader's position, if the loader has a `state_dict()`, its epoch, and what
    `capture` returns, with the loader's own generators (`DataLoader(generator=...)`). After
    `load_state_dict` the next batch is the one after the saved one, and the generators are where
    they were then, whenever the loader draws. A save within an epoch needs a loader with a
    position: torchdata's `StatefulDataLoader`, also inside of Accelerate's; or a `range`, `list` or
    `tuple`. The logger `holdfast` warns once of what a resume does not give back.

    Args:
        loader: The loader, or the steps of a loop that draws its own batches; iterate over it
            through this object alone.
        generators: As for `capture`.
    """

    def __init__(self, loader: Any, generators: Mapping[str, object] | None = None) -> None:
        self._loader, self._base = loader, getattr(loader, "base_dataloader", loader)
        own = own_generators(loader)
        self._has_own, self._generators = bool(own), {**own, **(generators or {})}
        self._loaded: Mapping[str, Any] | None = None
        self._taken, self._within, self._warned = 0, False, False
        self._begun = 0  # the batches of this epoch that another process took

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self._set_epoch(self._epoch())
            if self._base is not self._loader and hasattr(self._base, "load_state_dict"):
                self._base.load_state_dict({})  # Accelerate began it before it chose the sampler
        self._taken, self._within, self._begun = 0, True, 0
        if loaded is not None and (saved := position_of(loaded.get("loader"))) is not None:
            self._begun = 0 if saved.is_finished else saved.batches
        elif loaded is not None:
            self._begun = loaded.get("batches", 0)
        for batch in iter(self._loader) if loaded is None else self._continued(loaded):
            self._taken += 1
            yield batch
        self._within = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state; before the first batch after `load_state_dict`, what was loaded."""
        drawn = rng.capture(self._generators)
        if self._loaded is not None:
            if not rng.is_same(self._loaded["rng"], drawn):
                self._warn("training did not iterate over its Batches after load_state_dict")
            return dict(self._loaded)
        state: dict[str, Any] = {"rng": drawn, "epoch": self._epoch()}
        if hasattr(self._loader, "state_dict"):
            state["loader"] = self._loader.state_dict()
        elif isinstance(self._loader, _NUMBERED):
            state["batches"] = self._begun + self._taken if self._within else 0
        is_last = self._taken == length_of(self._loader) and not self._has_own
        if self._within and ("loader" in state or not is_last):
            self._warn(lost_within_an_epoch(self._loader))
        position, expected = position_of(state.get("loader")), self._begun + self._taken
        if self._within and position is not None and position.batches != expected:
            self._warn(f"it says that it is at batch {position.batches}, and is at {expected}")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with the next iteration.

        Raises:
            IncompatibleState: It is no such state, or has other generators.
        """
        if not isinstance(state, Mapping) or not {"rng", "epoch"} <= state.keys():
            raise IncompatibleState("not the state of holdfast.rng.Batches", found=type(state))
        rng.restore(state["rng"], self._generators)
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._loaded = state

    def _continued(self, loaded: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the batches that are left."""
        self._set_epoch(loaded["epoch"])
        base = self._base
        if "loader" in loaded:
            base.state_dict()  # torchdata's begins; after an epoch it begins again, at `iter`
        rng.restore(loaded["rng"], self._generators)
        begun, iterator = getattr(base, "_iterator", None), iter(self._loader)
        if "loader" not in loaded:
            yield from islice(iterator, self._begun, None)
            return
        if begun is None:
            rng.restore(loaded["rng"], self._generators)
        first = next(iterator, _END)
        is_apart = getattr(base, "_iterator", None) is not begun or not isgenerator(iterator)
        if not is_apart and not rng.is_same(loaded["rng"], rng.capture(self._generators)):
            rng.restore(loaded["rng"], self._generators)
            self._warn("its first batch drew random numbers, and it begins there or reads ahead")
        if first is not _END:
            yield first
            yield from iterator

    def _epoch(self) -> int | None:
        """Return the epoch that a loader, or a sampler of it, goes by."""
        if (counter := _counter(self._loader)) is None:
            return None
        epoch = counter.iteration if hasattr(counter, "iteration") else counter.epoch
        # Accelerate counts on behind the last batch, and says there that it is the last one.
        return int(epoch) + (self._within and getattr(counter, "end_of_dataloader", False))

    def _set_epoch(self, epoch: int | None) -> None:
        if epoch is not None and (counter := _counter(self._loader)) is not None:
            counter.set_epoch(epoch)

    def _warn(self, why: str | None) -> None:
        if why is not None and not self._warned:
            self._warned = True
            name = type(self._loader).__name__
            _LOGGER.warning("%s: a resume is not bit for bit: %s", name, why)


def own_generators(loader: Any) -> dict[str, Any]:
    """Return the generators of torch's that a loader and its samplers own, by name."""
    found = {id(own): own for _, one in parts_of(loader) if (own := _generator(one)) is not None}
    return {f"loader.{n}": one for n, one in enumerate(found.values())}


def lost_within_an_epoch(loader: Any) -> str | None:
    """Return why a loader cannot continue within an epoch; `None` if it can."""
    if isinstance(loader, _NUMBERED):
        return None
    if not hasattr(loader, "state_dict"):
        return "it has no state_dict(), and this save is within an epoch"
    for holder, one in parts_of(loader):
        is_saved = _library(one) == _library(holder) == "torchdata"  # its batch sampler saves it
        is_seeded = hasattr(one, "set_epoch") or hasattr(one, "state_dict")
        if one is not loader and hasattr(one, "generator") and not is_saved and not is_seeded:
            return f"the order of its {type(one).__name__} is drawn, and is in no state"
    if _counts_batches_of_others(loader):
        return "Accelerate before 1.13 saves a wrong position where several processes train"
    return None


def _counts_batches_of_others(loader: Any) -> bool:
    """Return whether Accelerate takes batches of other processes for ones that it has read ahead.

    Since 1.13 its `DataLoaderShard` replaces the method of its base class that does so.
    """
    method = getattr(type(loader), "adjust_state_dict_for_prefetch", None)
    is_shard = _library(loader) == "accelerate" and type(loader).__name__ == "DataLoaderShard"
    torch = sys.modules.get("torch.distributed")
    several = torch is not None and torch.is_initialized() and torch.get_world_size() > 1
    return (
        several
        and is_shard
        and not getattr(method, "__qualname__", "").startswith("DataLoaderShard")
    )


def parts_of(loader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a loader and its samplers, each with the one that holds it."""
    yield None, loader
    inner = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    inner.append(getattr(getattr(loader, "dataset", None), "_sampler", None))  # Lightning's wrapper
    one = next((one for one in inner if one is not None and one is not loader), None)
    if one is not None:
        yield loader, one
        yield from (
            (one if holder is None else holder, part)
            for holder, part in parts_of(one)
            if part is not one
        )


def length_of(loader: Any) -> int | None:
    """Return the number of batches of an epoch; `None` if nobody knows it."""
    try:
        return len(loader)
    except TypeError:
        return None


def _generator(one: Any) -> Any:
    """Return the generator of torch's that a loader or a sampler owns."""
    found = getattr(one, "generator", None)
    return found if type(found).__module__.startswith("torch") else None


def _counter(loader: Any) -> Any:
    counters = (one for _, one in parts_of(loader) if hasattr(one, "set_epoch"))
    return next(
        (one for one in counters if hasattr(one, "iteration") or hasattr(one, "epoch")), None
    )


def _library(one: Any) -> str:
    return type(one).__module__.partition(".")[0]
