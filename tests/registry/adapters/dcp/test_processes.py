"""Ranks that are processes: DCP saves what `run.save` saves, and loads it into every layout."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path

import pytest

import holdfast
from holdfast import Registry
from tests.registry.adapters.dcp import acts
from tests.registry.saving.collective.acts import plain
from tests.registry.saving.collective.fleet import Fleet

pytestmark = pytest.mark.xdist_group("forked")


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    return holdfast.init(tmp_path / secrets.token_hex(4))  # ranks remember registries by place


def alone(reg: Registry) -> str:
    """Save the plain state in one process; return its id."""
    return reg.run("alone", create=True).save(plain(), step=0).digest.hex()


def test_two_ranks_save_and_load_what_one_saves(reg: Registry, fleet: Fleet) -> None:
    saved = alone(reg)
    for kind in ("fsdp", "tp"):
        assert fleet.run(2, acts.saved_each_way, reg.url, kind) == [[saved] * 3] * 2
    for ref, kind, together in (
        ("alone/latest", "fsdp", False),
        ("fsdp/latest", "tp", True),
        ("tp/latest", "plain", False),
    ):
        assert fleet.run(2, acts.loaded, reg.url, ref, kind, together) == [[]] * 2, (ref, kind)
    assert reg.checkpoint("fsdp/latest").metrics == {"loss": 3}


def test_saves_of_another_process_are_those_of_the_handle(reg: Registry, fleet: Fleet) -> None:
    saved = alone(reg)
    # Step 2 was superseded once, by the first save of the other process.
    right = [saved, saved, saved, [1, 5, 6, 7], "UnsupportedValue 1"]
    assert fleet.run(2, acts.saved_by_processes, reg.url, "fsdp") == [right] * 2


def test_a_rank_that_fails_is_named_and_nothing_is_visible(reg: Registry, fleet: Fleet) -> None:
    saved = alone(reg)
    for use_collectives in (True, False):
        found = fleet.run(2, acts.failed, reg.url, f"run{use_collectives}", use_collectives)
        assert found == [("UnsupportedValue", 1, saved)] * 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_layout_loads_into_every_other(reg: Registry, fleet: Fleet) -> None:
    saved = alone(reg)
    layouts = [("fsdp", 4), ("tp", 2), ("fsdp-tp", 4), ("hsdp", 4), ("plain", 3)]
    for kind, size in layouts:
        assert fleet.run(size, acts.saved_each_way, reg.url, kind) == [[saved] * 3] * size
    for (kind, _), (into, size) in itertools.product(layouts, layouts):
        for together in (True, False):
            found = fleet.run(size, acts.loaded, reg.url, f"{kind}/latest", into, together)
            assert found == [[]] * size, (kind, into, together)
