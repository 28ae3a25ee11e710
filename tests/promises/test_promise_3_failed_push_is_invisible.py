"""Promise 3: a failed or interrupted push is invisible and can be retried."""

from __future__ import annotations

import itertools

import pytest

from holdfast.backends import Backend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import StorageError, StoreFull
from holdfast.registry.face.factory import open_on
from tests.support.pictures import RUN, picture_of_runs
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import opened


@pytest.mark.parametrize("error", [None, StoreFull("no space left")], ids=["killed", "full"])
def test_promise_3_failed_push_is_invisible(store: Backend, error: StorageError | None) -> None:
    with opened(store) as registry:
        run = registry.create_run(RUN, seed=1)
        run.save(make_state(1), step=1)
        before = picture_of_runs(store)
    for at in itertools.count(1):
        registry = open_on(Faulty(store, [Fault(at, error=error)]))
        try:
            # Another state at each attempt, so that each has everything to put.
            registry.run(RUN).save(make_state(100 + at), step=2)
        except (InjectedCrash, StorageError):
            assert picture_of_runs(store) == before
            with opened(store) as healthy:
                assert healthy.verify(deep=True).ok
        else:
            break
        finally:
            registry.close()
    assert at == 6  # two packs, manifest, placement and slot: each of them failed once
    with opened(store) as registry:
        assert [checkpoint.step for checkpoint in registry.run(RUN).checkpoints()] == [1, 2]
        assert_same(registry.checkpoint(RUN).load(), make_state(100 + at))
