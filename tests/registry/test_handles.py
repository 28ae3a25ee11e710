"""Handles that a process opens one after another stay small; and none can be pickled or copied."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.registry.errors import UnsupportedValue

_STATE = {"model": {f"w{n}": np.full(2, n, np.float32) for n in range(200)}}


def _growth(cycle: Callable[[int], None], cycles: range) -> float:
    """Return by how many bytes a cycle grows the memory, on average."""
    before = tracemalloc.get_traced_memory()[0]
    for n in cycles:
        cycle(n)
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / len(cycles)


@pytest.mark.parametrize("cycles", [5, pytest.param(3_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(0)
def test_memory_stays_flat_over_handles(tmp_path: Path, cycles: int) -> None:
    """Each handle saves, and says nothing of its end: the end of the process will.

    What a process makes once, such as a late import, is in one of the three stretches at most;
    handles that stay are in all.
    """
    holdfast.init(tmp_path / "reg").close()

    def cycle(n: int) -> None:
        with holdfast.open(tmp_path / "reg") as reg:
            run = reg.run(f"run{n % 2}", create=True)
            if n < 2:
                run.save(_STATE, step=1)
            else:
                run.restore()
                run.save(_STATE, step=1 + n)
                run.retention.evict(run.checkpoints()[0], reason="so that the log stays as it is")

    for n in range(20):  # until the log has a snapshot
        cycle(n)
    tracemalloc.start()
    try:
        starts = range(20, 20 + 3 * cycles, cycles)
        grown = [_growth(cycle, range(start, start + cycles)) for start in starts]
    finally:
        tracemalloc.stop()
    print(f"bytes that stay of a handle, in three stretches of {cycles}: {grown}")
    assert min(grown) < 20_000


_HANDLES: dict[str, Callable[[holdfast.Registry], Any]] = {
    "registry": lambda reg: reg,
    "run": lambda reg: reg.run("run"),
    "checkpoint": lambda reg: reg.checkpoint("run/latest"),
    "stored": lambda reg: reg.stored("run/latest"),
    "pool": lambda reg: reg.run("run").pool,
    "stream": lambda reg: reg.run("run").streams["loss"],
    "pending save": lambda reg: reg.run("run").save_async({"x": 1}, step=2),
    "watch": lambda reg: reg.run("run").follow.checkpoints(),
    "journaled run": lambda reg: reg.run("run"),
}


@pytest.mark.parametrize("copy_it", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("kind", _HANDLES)
def test_a_handle_is_neither_pickled_nor_copied(
    tmp_path: Path, kind: str, copy_it: Callable[[Any], Any]
) -> None:
    holdfast.init(tmp_path / "reg").create_run("run").save(_STATE, step=1)
    journal = str(tmp_path / "journal") if "journal" in kind else ""
    with holdfast.open(tmp_path / "reg", journal=journal) as reg:
        handle = _HANDLES[kind](reg)
        with pytest.raises(UnsupportedValue, match="pickled or copied") as caught:
            copy_it(handle)
    assert isinstance(caught.value, TypeError)
    assert "run: step 2" in str(caught.value) or str(tmp_path / "reg") in str(caught.value)
    assert "pass" in (caught.value.hint or "").lower()
