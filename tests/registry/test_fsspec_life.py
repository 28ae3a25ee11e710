"""A run on stores behind fsspec: save, gate, evict, collect, sync to S3 and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import holdfast
from holdfast.errors import InvalidLocation
from tests.servers.fixtures import S3Server


@pytest.mark.parametrize("store", ["azure", "google", "s3fs"])
def test_life(
    store: str, request: pytest.FixtureRequest, moto_url: Callable[[], str], tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    fresh = {"azure": "azure_url", "google": "gs_url"}
    url = request.getfixturevalue(fresh[store]) if store in fresh else moto_url()
    holdfast.init(url, skip_race_probe=store == "s3fs").close()
    # Azure and Google through their URLs; S3 by the transport that is not the usual one.
    transport: Literal["s3fs"] | None = "s3fs" if store == "s3fs" else None
    registry = holdfast.open(url, transport=transport)
    plain = holdfast.init(tmp_path / "plain")

    states = [{"w": np.arange(100_000, dtype="f4") + n, "step": n} for n in range(3)]
    saved = []
    for place in (registry, plain):
        run = place.create_run("life", seed=1)
        saved.append([run.save(state, step=n) for n, state in enumerate(states)])
    here, there = saved
    assert [one.handle.record.manifest for one in here] == [
        one.handle.record.manifest for one in there
    ]

    run = registry.run("life")
    run.pins.gates.set("good", here[1])
    run.retention.prune(holdfast.Retention(last=1))
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


def test_options_lead_to_a_registry(
    moto_server: S3Server,
    moto_url: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3fs = pytest.importorskip("s3fs")
    url = moto_url()
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {"endpoint_url": moto_server.endpoint_url, "key": "test", "secret": "hidden"}
    state = {"w": np.arange(70_000)}
    with holdfast.init(url, skip_race_probe=True, storage_options=options) as made:
        digest = made.create_run("run", seed=1).save(state, step=1).digest
        id_ = made.handle.store.config.id
    bucket = url.removeprefix("s3://")
    cache = tmp_path / "cache"
    ways = [
        {"url": url, "storage_options": options},
        {"url": url, "storage_options": options, "transport": "s3fs"},
        {"url": bucket, "fs": s3fs.S3FileSystem(**options, skip_instance_cache=True)},
    ]
    for way in ways:
        with holdfast.open(**way, expect_id=id_, cache=cache) as found:
            assert found.checkpoint("run").digest == digest
            np.testing.assert_array_equal(found.checkpoint("run").load()["w"], state["w"])
            assert "hidden" not in found.url
    with pytest.raises(InvalidLocation, match="nonsense") as refused:
        holdfast.open(url, storage_options={**options, "nonsense": 1})
    assert "hidden" not in str(refused.value)


def test_a_folder_through_fsspec_is_our_own_store(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with holdfast.init(tmp_path / "r", fs=fsspec.filesystem("file")) as made:
        made.create_run("run").save({"w": 1}, step=1)
    with holdfast.open(tmp_path / "r") as found:
        assert found.checkpoint("run").load() == {"w": 1}
