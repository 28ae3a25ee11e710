"""Real ranks: every layout gives one id, and an unchanged state stores nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import Registry
from tests.registry.collective import acts
from tests.registry.collective.fleet import Fleet

pytestmark = pytest.mark.xdist_group("collective")

LAYOUTS = [
    ("plain", 4),
    ("fsdp", 4),
    ("tp", 2),
    ("fsdp-tp", 4),
    ("hsdp", 4),
    ("fsdp", 2),
    ("fsdp", 1),
]


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    return holdfast.init(tmp_path / "reg")


def packs(reg: Registry) -> set[Path]:
    return set((Path(reg.url.removeprefix("file://")) / "packs").rglob("*.*"))


def test_every_layout_has_the_id_of_the_plain_state_and_stores_it_once(
    reg: Registry, fleet: Fleet
) -> None:
    alone = reg.run("alone", create=True).save(acts.plain(), step=0).digest
    kept: set[Path] = set()
    for step, (kind, size) in enumerate(LAYOUTS):
        found = fleet.run(size, acts.saved, reg.url, "together", kind, step)
        assert found == [str(alone)] * size, kind
        if kept:
            assert packs(reg) == kept, f"{kind} on {size} ranks stored an unchanged state"
        kept = packs(reg)
        # And back, into the layout of the next save.
        into, ranks = LAYOUTS[(step + 1) % len(LAYOUTS)]
        assert fleet.run(ranks, acts.loaded, reg.url, "together/latest", into) == [[]] * ranks
    assert not reg.verify(deep=True).findings
