"""What reading encoded chunks takes of memory besides the state itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast import Storing
from holdfast.registry.face.registry import Registry
from holdfast.registry.store import fetching as ranged_reads
from tests.support.stores import small_grid

CHUNK_BYTES = 16 * 1024


@pytest.mark.parametrize("keyframe_every", [None, 8])
def test_what_is_stored_of_a_state_is_not_held_all_at_once(
    keyframe_every: int | None, reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reg.handle.store.backend, "least_read_bytes", CHUNK_BYTES)
    asked: dict[str, list[int]] = {}
    take = ranged_reads.Scratch.take

    def noted(self: ranged_reads.Scratch, use: Any, nbytes: int) -> memoryview:
        asked.setdefault(use, []).append(nbytes)
        return take(self, use, nbytes)

    monkeypatch.setattr(ranged_reads.Scratch, "take", noted)
    weights = np.random.default_rng(0).integers(0, 64, 2**22, dtype=np.uint8)
    with small_grid(CHUNK_BYTES, list_threshold=1024):
        run = reg.create_run("run", seed=1)
        for step in range(3):
            weights[step :: 64 * 8] += 1
            kept = run.save(
                {"model": {"w": weights}},
                step=step,
                storing=Storing(compression="zstd", keyframe_every=keyframe_every),
            )
        into = {"w": np.zeros_like(weights)}
        rows = kept.handle.reader.placement.rows
        assert all(row.codec for row in rows)
        kept.load_into(into, component="model")
    assert np.array_equal(into["w"], weights)
    # A job holds what makes up one read; all that is stored would be most of the state.
    longest = max(row.stored_bytes for row in rows)
    assert max(asked["stored"]) < CHUNK_BYTES + longest
    assert max(asked.get("raw", [0])) <= CHUNK_BYTES
    assert len(asked["stored"]) > sum(row.stored_bytes for row in rows) / 2 / CHUNK_BYTES
    assert bool(keyframe_every) == ("raw" in asked)
