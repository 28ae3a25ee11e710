"""Promise 4: collection never deletes what a live checkpoint needs, while any writer pushes.

A collection without grace comes in the instant before a commit lands, and its deletions land late
and twice: what it condemned is never named again. That no order of events is worse is shown in
tests/model, tests/schedules, tests/stateful and tests/storm.
"""

from __future__ import annotations

import pytest

from holdfast.backends import Backend, Body
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Wrapper
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects.keys import KINDS, ObjectKey
from tests.support.pictures import RUN
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import opened


class _CollectedBeforeCommit(Wrapper):
    """A store that is collected in the instant before a commit lands; its deletions are held up."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.deletions: list[str] | None = None

    def put_if_absent(self, key: str, body: Body) -> bool:
        if "/log/" in key and self.deletions is None:
            held = _HeldDeletions(self.inner)
            with opened(held) as registry:
                registry.gc(grace_s=0)
            self.deletions = held.deletions
        return super().put_if_absent(key, body)


class _HeldDeletions(Wrapper):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.deletions: list[str] = []

    def delete(self, key: str) -> None:
        self.deletions.append(key)


def _objects(backend: Backend) -> list[str]:
    return [info.key for info in backend.list() if info.key.startswith(KINDS)]


def test_promise_4_collection_spares_what_is_pushed(store: Backend) -> None:
    with opened(store) as registry:
        registry.create_run(RUN, seed=1)
    # A push that died before its commit: everything it put is there, and nothing needs it.
    dying = open_on(Faulty(store, [Fault(at=5)]))
    with pytest.raises(InjectedCrash):
        dying.run(RUN).save(make_state(1), step=1)
    dying.close()
    left = _objects(store)
    assert len(left) == 4
    # The next push finds all of it. It is condemned before the commit lands, and so named nowhere.
    collected = _CollectedBeforeCommit(store)
    with opened(collected) as registry:
        registry.run(RUN).save(make_state(1), step=1)
    assert sorted(collected.deletions or ()) == sorted(left)
    for key in left * 2:
        store.delete(key)
    with opened(store) as registry:
        assert_same(registry.checkpoint(RUN).load(), make_state(1))
        assert registry.verify(deep=True).findings == ()
        registry.gc(grace_s=0)
    assert [ObjectKey.parse(key).generation for key in _objects(store)] == [1, 1, 1, 1]
