"""What a writer was given comes back from its file, or the writer refuses it by name."""

from __future__ import annotations

import copy
import datetime as dt
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.registry import formats
from holdfast.registry.curation.cards import read_card, write_card
from holdfast.registry.errors import RegistryError
from holdfast.registry.formats import thalia
from tests.registry.formats import test_burn, test_cobre, test_hf, test_thalia

#: Values that some format might lose: kinds, types and bits that others turn into each other.
RICH: dict[str, Any] = {
    "none": None,
    "true": True,
    "zero": -0.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "big": 2**70,
    "text": "ü\n\u2028 'quoted' 1:30",
    "bytes": b"\0\xff",
    "tuple": (1, (2, 3)),
    "list": [1, 2.0, "x"],
    "mixed": [np.float32([1]), {"deep": [(torch.ones(2),)]}],
    "empty": {},
    "no list": [],
    "ordered": OrderedDict(b=1, a=2),
    "set": {1, 2},
    "complex": 1 + 2j,
    "number key": {7: 1},
    "tuple key": {(1, 2): 1},
    "date": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    "scalar": np.float32(0.1),
    "array": np.arange(6, dtype=np.float64).reshape(2, 3)[:, ::2],
    "strings": np.array(["a", "b"]),
    "big end": np.arange(3, dtype=">f4"),
    "half": np.ones(3, np.float16),
    "unsigned": np.arange(3, dtype=np.uint16),
    "tensor": torch.arange(6.0).reshape(2, 3).T,
    "point": torch.tensor(3),
    "nothing": torch.zeros(0, 3),
    "bfloat": torch.ones(3, dtype=torch.bfloat16),
    "sparse": torch.eye(3).to_sparse(),
}


def parts_of(value: Any) -> Any:
    """Return a value in which arrays and tensors are one kind, as are dicts and ordered ones."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return ("sparse", parts_of(value.to_dense()))
        kind = str(value.dtype).removeprefix("torch.")
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("array", kind, tuple(value.shape), data)
    if isinstance(value, np.ndarray | np.generic):
        plain = np.asarray(value)
        plain = plain.astype(plain.dtype.newbyteorder("="))
        return ("array", plain.dtype.name, plain.shape, plain.tobytes())
    if isinstance(value, dict):
        return ("dict", {key: parts_of(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return (type(value).__name__, [parts_of(item) for item in value])
    return (type(value).__name__, repr(value))


def is_in(given: Any, found: Any) -> bool:
    """Return whether everything given is found; a file may add what it says of itself."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
        return (
            isinstance(found, tuple)
            and given[0] == found[0]
            and all(
                key in found[1] and is_in(item, found[1][key]) for key, item in given[1].items()
            )
        )
    return bool(given == found)


def places(state: Any, depth: int = 3) -> Iterator[tuple[str, ...]]:
    """Yield the path of each dict of a state."""
    yield ()
    if depth:
        for key, value in state.items():
            if isinstance(value, dict):
                yield from ((key, *rest) for rest in places(value, depth - 1))


def brain() -> dict[str, Any]:
    more = {name: {"phase": 0.25} for name in ("config", "theta", "scheduler", "trial_state")}
    return {**test_thalia.brain(), **more, "training_steps": 7, "metadata": {"note": "x"}}


def by_name(name: str) -> Callable[[Path, Any], Any]:
    def through(folder: Path, state: Any) -> Any:
        path = folder / (f"a.{name}" if "." not in name else name)
        known = name if name in ("hf", "cobre", "andrea", "tree", "opaque") else None
        formats.write(path, state, format=known)
        return formats.read(path, format=known).state

    return through


def by_delta(folder: Path, state: Any) -> Any:
    thalia.save(folder / "base.thalia", brain())
    thalia.save_delta(folder / "next.delta.thalia", state, folder / "base.thalia", threshold=0)
    return thalia.load(folder / "next.delta.thalia").state


def by_card(folder: Path, state: Any) -> Any:
    (folder / "card.yaml").write_text(write_card(state), encoding="utf-8")
    return read_card(folder / "card.yaml")


def of_hf(folder: Path) -> Any:
    return formats.read(test_hf.small(folder / "sample"), format="hf").state


def of_files(folder: Path) -> Any:
    (folder / "sample").mkdir()
    (folder / "sample/notes.txt").write_text("notes")
    return formats.read(folder / "sample", format="tree").state


WEIGHTS = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
STEP = {"step": 3, **{name: torch.ones(4) for name in ("weights", "m", "v")}}
ABOUT = {"metadata": test_burn.ABOUT, "item": {"w": torch.ones(2, 3)}}
#: Name of the writer -> what makes a state that fits, and what writes and reads it.
WRITERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Any], Any]]] = {
    "torch": (lambda _: {"model": dict(WEIGHTS), "optimizer": {"state": {}}}, by_name("pt")),
    "safetensors": (lambda _: {"model": dict(WEIGHTS)}, by_name("safetensors")),
    "npz": (lambda _: {"arrays": {"a": np.ones(3)}}, by_name("npz")),
    "zarr": (lambda _: {"model": dict(WEIGHTS), "optimizer": {"state": {}}}, by_name("zarr")),
    "thalia": (lambda _: brain(), by_name("thalia")),
    "thalia.zst": (lambda _: brain(), by_name("a.thalia.zst")),
    "thalia delta": (lambda _: brain(), by_delta),
    "burn": (lambda _: copy.deepcopy(ABOUT), by_name("mpk")),
    "hf": (of_hf, by_name("hf")),
    "cobre": (lambda _: test_cobre.policy(), by_name("cobre")),
    "andrea": (lambda _: dict(STEP), by_name("andrea")),
    "tree": (of_files, by_name("tree")),
    "opaque": (
        lambda _: {"file": {"name": "a.opaque", "bytes": np.zeros(3, np.uint8)}},
        by_name("opaque"),
    ),
    "card": (lambda _: {"license": "mit", "more": {"a": 1}}, by_card),
}


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", WRITERS)
def test_everything_that_was_given_comes_back_or_is_refused(
    name: str, every: int, tmp_path: Path
) -> None:
    """All values at the top of a state, and one of `every` in each dict below it."""
    make, through = WRITERS[name]
    (tmp_path / "made").mkdir()
    sample = make(tmp_path / "made")
    (tmp_path / "0").mkdir()
    assert is_in(parts_of(sample), parts_of(through(tmp_path / "0", sample)))
    lost, kept = [], 0
    numbers = itertools.count(1)
    # Compressed it is the same document.
    for number, place in enumerate(places(sample, depth=1 if name == "thalia.zst" else 3)):
        step = every if place else 1
        for kind, value in itertools.islice(RICH.items(), number % step, None, step):
            state = copy.deepcopy(sample)
            inner: Any = state
            for key in place:
                inner = inner[key]
            if name == "card" and kind in ("tuple", "date"):
                continue  # a card has lists and texts for them, as its reader says
            inner["extra"] = value
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            try:
                found = through(folder, state)
            except RegistryError:
                continue
            kept += 1
            if not is_in(parts_of(state), parts_of(found)):
                lost.append(f"{'/'.join(map(str, place))}: {kind}")
    assert lost == []
    assert kept or name in ("safetensors", "npz", "cobre", "andrea", "tree", "opaque")


def test_a_delta_keeps_what_is_beside_the_regions(tmp_path: Path) -> None:
    base, state = brain(), brain()
    thalia.save(tmp_path / "a.thalia", base)
    for number, key in enumerate(("config", "theta", "scheduler", "trial_state")):
        state[key] = {"phase": 0.5, "number": number}
    state["training_steps"] = 8
    thalia.save_delta(tmp_path / "b.delta.thalia", state, tmp_path / "a.thalia", threshold=0)
    found = thalia.load(tmp_path / "b.delta.thalia").state
    assert {key: found[key] for key in state if key != "metadata"} | {"metadata": 0} == {
        **found, "metadata": 0
    }  # fmt: skip
    for key in ("config", "theta", "scheduler", "trial_state", "training_steps"):
        assert found[key] == state[key]
    del state["theta"]
    thalia.save_delta(tmp_path / "c.delta.thalia", state, tmp_path / "a.thalia")
    assert set(found) - set(thalia.load(tmp_path / "c.delta.thalia").state) == {"theta"}
