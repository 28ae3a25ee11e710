"""The bytes of a registry, and what would be freed; nothing is written."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast import Monitor, Registry, Retention
from holdfast.registry.errors import InvalidInput
from holdfast.registry.ui.pages import storage as query
from holdfast.registry.ui.pages.storage import VIEW, count_bytes, plan_prune, storage_view
from holdfast.registry.ui.pages.view import Asked
from tests.registry.ui.sources import source_of
from tests.support.faults import flip
from tests.support.stores import bytes_in, contents


@pytest.fixture
def saved(reg: Registry):
    for name in ("small", "large"):
        run = reg.create_run(name, monitor=Monitor(metric="loss", mode="min"))
        for step in (1, 2, 3):
            state = {"w": np.full(100 if name == "small" else 90_000, step, np.float32)}
            run.save(state, step=step, metrics={"loss": float(step)})
    return reg


def test_the_first_view_lists_objects_and_opens_nothing(saved, backend) -> None:
    with source_of(backend) as source, source.meter.measure() as used:
        found = storage_view(source)
    assert used.calls == {"list": 3}
    held = contents(backend)
    for kind in found.kinds:
        mine = [data for key, data in held.items() if key.startswith(kind.name)]
        assert (kind.objects, kind.nbytes, kind.is_all) == (len(mine), sum(map(len, mine)), True)
    assert found.nbytes == found.growth[-1].nbytes
    assert sum(one.packs for one in found.packs) == found.kinds[0].objects
    assert sum(one.nbytes for one in found.packs) == found.kinds[0].nbytes


def test_a_large_listing_is_a_sample(saved, backend, monkeypatch) -> None:
    monkeypatch.setattr(query, "LISTED", 2)
    with source_of(backend) as source:
        found = storage_view(source)
    assert not found.is_all
    assert [kind.objects for kind in found.kinds] == [2, 2, 2]
    first = [data for _, data in sorted(contents(backend, "packs/").items())][:2]
    assert found.kinds[0].nbytes == sum(map(len, first))


def test_bytes_are_counted_by_run_as_du_counts_them(saved, backend) -> None:
    with source_of(backend) as source:
        found = count_bytes(source)
    assert [one.run for one in found.runs] == ["large", "small"]
    assert found.usage.total_bytes == bytes_in(backend)


def test_plans_write_nothing(saved, backend) -> None:
    saved.run("large").retention.prune(Retention(last=1))
    saved.create_run("plain").save({"a": 1}, step=1)
    before = contents(backend)
    with source_of(backend) as source:
        report = VIEW.ask(source, Asked(query={"gc": ["1"], "grace": ["0"]})).body.gc
        plan = plan_prune(source, "small", Retention(last=1, best=1))
        with pytest.raises(InvalidInput, match="no retention policy"):
            plan_prune(source, "small")
        with pytest.raises(InvalidInput, match="monitor"):
            plan_prune(source, "plain", Retention(best=1))
    assert report.condemned.size_bytes > 300_000  # step 2 of the large run
    assert [one.checkpoint.step for one in plan.kept] == [3, 1]
    assert [one.checkpoint.step for one in plan.evicted] == [2]
    assert (plan.kept_count, plan.evicted_count, plan.evicted_bytes) == (2, 1, 400)
    assert contents(backend) == before


def test_a_damaged_run_does_not_hide_the_bytes_of_others(saved, backend) -> None:
    flip(backend, next(key for key in contents(backend) if key.startswith("runs/small/log")))
    with source_of(backend) as source:
        found = count_bytes(source)
    assert [one.run for one in found.runs] == ["large"]
    assert list(found.usage.damaged) == ["small"]


def test_nothing_is_nothing(backend) -> None:
    with source_of(backend) as source:
        found = storage_view(source)
        assert (found.nbytes, found.packs, found.growth, found.is_all) == (0, (), (), True)
        assert count_bytes(source).runs == ()
        assert VIEW.ask(source, Asked(query={"gc": ["1"]})).body.gc.condemned.objects == 0
