"""A run on stores behind fsspec: save, gate, evict, collect, sync to S3 and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.backends import open_backend
from holdfast.registry.factory import open_on


@pytest.mark.parametrize("store", ["azure", "s3fs"])
def test_life(
    store: str, request: pytest.FixtureRequest, moto_url: Callable[[], str], tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    url = request.getfixturevalue("azure_url") if store == "azure" else moto_url()
    holdfast.init(url, skip_race_probe=store == "s3fs").close()
    # Azure through its URL; S3 by the transport that is not the usual one.
    transport = "s3fs" if store == "s3fs" else None
    registry = open_on(open_backend(url, transport=transport))  # type: ignore[arg-type]
    plain = holdfast.init(tmp_path / "plain")

    states = [{"w": np.arange(100_000, dtype="f4") + n, "step": n} for n in range(3)]
    saved = []
    for place in (registry, plain):
        run = place.create_run("life", seed=1)
        saved.append([run.save(state, step=n) for n, state in enumerate(states)])
    here, there = saved
    assert [one.record.manifest for one in here] == [one.record.manifest for one in there]

    run = registry.run("life")
    run.set_gate("good", here[1])
    run.prune(holdfast.Retention(last=1))
    left = [one.step for one in run.checkpoints()]
    assert 0 not in left
    assert {1, 2} <= set(left)
    assert registry.verify(deep=True).findings == ()
    registry.gc()
    registry.close()

    second = moto_url()
    holdfast.init(second, skip_race_probe=True).close()
    holdfast.sync(url, second)
    back = holdfast.open(second)
    assert [one.step for one in back.run("life").checkpoints()] == left
    found = back.checkpoint("life/latest").load()
    np.testing.assert_array_equal(found["w"], states[2]["w"])
    assert holdfast.sync(second, url).runs[0].commits == 0
