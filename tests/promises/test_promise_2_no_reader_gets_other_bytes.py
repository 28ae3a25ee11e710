"""Promise 2: no reader is ever handed bytes that do not hash to what was committed."""

from __future__ import annotations

import random

import pytest

from holdfast.backends import Backend
from holdfast.backends.wrappers import Faulty
from holdfast.registry.errors import IntegrityError, RestoreFailed
from holdfast.registry.saving.restoring import Restored
from tests.support.pictures import RUN
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import contents, opened


def test_promise_2_no_reader_gets_other_bytes(store: Backend) -> None:
    with opened(store) as registry:
        run = registry.create_run(RUN, seed=1)
        run.save(make_state(1), step=1)
        run.save(make_state(2), step=2)
    chance = random.Random(2)
    flips = 20 if store.url.startswith("memory:") else 1
    refused = 0
    for key, data in contents(store).items():
        for bit in chance.sample(range(8 * len(data)), flips):
            restored, said = _restore(Faulty(store, flipped={key: bit}))
            if restored is None:
                assert key in said
                refused += 1
            else:
                # A damaged newest checkpoint is passed over, and the report says so.
                assert restored.checkpoint.step == 2 - len(restored.report)
                assert_same(restored.state, make_state(restored.checkpoint.step))
                refused += len(restored.report)
    assert refused > 0


def _restore(store: Backend) -> tuple[Restored | None, str]:
    """Return what comes back from a store, or why nothing does."""
    try:
        with opened(store) as registry:
            return registry.run(RUN).restore(), ""
    except (IntegrityError, RestoreFailed) as error:
        return None, str(error)


def test_promise_2_holds_for_memory_of_the_caller(store: Backend) -> None:
    with opened(store) as registry:
        checkpoint = registry.create_run(RUN, seed=1).save(make_state(1), step=1)
        packs = [info.key for info in store.list("packs/")]
        into = make_state(9)
        checkpoint.load_into({name: into[name] for name in ("model", "optimizer")}, strict=False)
        assert_same(into["model"], make_state(1)["model"])
    for key in packs:
        with opened(Faulty(store, flipped={key: 77})) as registry:
            checkpoint = registry.checkpoint(f"{RUN}/latest")
            with pytest.raises(IntegrityError, match=key):
                checkpoint.load_into(make_state(9), strict=False)
