"""The few states that the machine saves, so that equal ones and shared chunks are common."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from holdfast.registry.face.factory import open_on
from holdfast.registry.values.digest import Digest
from tests.support.inline import without_threads
from tests.support.stores import new_backend

MODELS, OPTIMIZERS = 5, 3
#: How many states there are to save.
CONTENTS = MODELS * OPTIMIZERS
ARTIFACTS, CARDS = 4, 2


def _array(kind: int, number: int, count: int, dtype: str) -> np.ndarray:
    """Return an array that differs from others of its kind in one element: deltas win."""
    array = np.random.default_rng(kind).integers(0, 30_000, count).astype(dtype)
    array[number] += 1
    return array


def model(number: int) -> dict[str, Any]:
    """Return a model; two of them share half of their chunks."""
    return {"a": _array(0, number, 60, "<f4"), "b": _array(1, number % 2, 100, "<i2")}


def content(number: int) -> dict[str, Any]:
    """Return a state to save."""
    optimizer, chosen = divmod(number % CONTENTS, MODELS)
    return {"model": model(chosen), "optimizer": {"m": _array(2, optimizer, 40, "<f8"), "lr": 0.1}}


def cut(number: int) -> dict[str, Any]:
    """Return what inference needs of a state."""
    return {"model": content(number)["model"]}


def companion(number: int) -> dict[str, Any]:
    """Return a state beside a checkpoint; it shares a chunk with a model."""
    return {"policy": {"w": _array(0, number % MODELS, 60, "<f4")}}


def artifact(number: int) -> dict[str, Any]:
    """Return a state to keep for good; an orphan of the one is what another run adds."""
    chosen = number % ARTIFACTS
    return {"bank": _array(2, chosen % OPTIMIZERS, 40, "<f8"), "number": chosen}


def card(number: int) -> dict[str, Any]:
    """Return a model card."""
    return {"name": f"card {number % CARDS}", "about": "said at some length " * 4}


@cache
def known_states() -> dict[Digest, Any]:
    """Return every state that the machine saves by its id; but for entries of streams."""
    states = [make(number) for make in (content, cut, companion) for number in range(CONTENTS)]
    states += [artifact(number) for number in range(ARTIFACTS)]
    states += [{"card": dict(sorted(card(number).items()))} for number in range(CARDS)]
    with without_threads(open_on(new_backend())) as registry:
        run = registry.create_run("known", seed=1)
        return {run.save(state, step=step).digest: state for step, state in enumerate(states)}


@cache
def digest_of(make: Any, number: int) -> Digest:
    """Return the id of the state that `make(number)` returns."""
    with without_threads(open_on(new_backend())) as registry:
        return registry.create_run("one", seed=1).save(make(number), step=1).digest


def number_of(digest: Digest) -> int:
    """Return the number of a state to save by its id."""
    return next(number for number in range(CONTENTS) if digest_of(content, number) == digest)


def entries(start: int, count: int, kind: int) -> list[dict[str, Any]]:
    """Return entries for a stream: the same ones in every run that has got as far."""
    return [{"step": step, "loss": (step + kind) * 0.5} for step in range(start, start + count)]
