"""The end of Hydra's run: nothing is damaged, and everything is dropped."""

from __future__ import annotations

import pytest

from holdfast.registry.errors import Conflict
from tests.systems import hydra_life as acts
from tests.systems.hydra_life import Hydra
from tests.systems.life import Life

pytestmark = pytest.mark.xdist_group("hydra")


def test_nothing_is_damaged_and_dropping_ends_it(hydra: Life[Hydra]) -> None:
    story = hydra.through(acts.ending)
    assert story.findings == ()
    with story.place.open() as reg:
        run = reg.run(story.run_id)
        dropped = run.manifest
        assert (dropped.dropped, dropped.held) == ("the league is over", frozenset())
        # The fork holds what it inherited, whatever becomes of its parent.
        side = reg.checkpoint(f"{story.run_id}-side/latest")
        state = side.load()
        assert (state["phase"], state["global_step"]) == (1, side.step)
        with pytest.raises(Conflict, match="dropped"):
            run.save(state, phase=1, step=10**7)
        assert reg.verify().ok
