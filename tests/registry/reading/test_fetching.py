"""What reading encoded chunks takes of memory besides the state itself."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from registry.registry import Registry
from tests.registry.conftest import small_grid

CHUNK_BYTES = 16 * 1024


@pytest.mark.parametrize("keyframe_every", [None, 8])
def test_what_is_stored_of_a_state_is_not_held_all_at_once(
    keyframe_every: int | None, reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reg.store.backend, "least_read_bytes", CHUNK_BYTES)
    weights = np.random.default_rng(0).integers(0, 64, 2**22, dtype=np.uint8)
    with small_grid(CHUNK_BYTES, list_threshold=1024):
        run = reg.create_run("run", seed=1)
        for step in range(3):
            weights[step :: 64 * 8] += 1
            kept = run.save(
                {"model": {"w": weights}},
                step=step,
                compression="zstd",
                keyframe_every=keyframe_every,
            )
        into = {"w": np.zeros_like(weights)}
        rows = kept.placement.rows
        assert all(row.codec for row in rows)
        kept.load_into(into, component="model")
        into["w"][:] = 0
        tracemalloc.start()
        try:
            kept.load_into(into, component="model")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert np.array_equal(into["w"], weights)
    # The threads hold some chunks each; all that is stored would be most of the state.
    assert sum(row.stored_bytes for row in rows) > weights.nbytes / 2 or keyframe_every
    assert peak < weights.nbytes / 4
