"""Promise 4: collection never deletes what a live checkpoint needs, while any writer pushes.

Shown from the writer's side: what a sweep condemned is never named again, however late the sweep
comes and its deletions land.
"""

from __future__ import annotations

import pytest

from backends import Backend, Body
from backends.wrappers import Fault, Faulty, InjectedCrash, Wrapper
from registry.actions import Mark
from registry.epochs import encode_sweep
from registry.keys import KINDS, ObjectKey, epoch_key
from registry.log import RunLog
from registry.registry import open_on
from tests.crash.world import RUN, make_state, opened
from tests.registry.pytree.same import assert_same


class _SweptBeforeCommit(Wrapper):
    """A store that a collector sweeps in the instant before a commit lands."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.condemned: list[str] = []

    def put_if_absent(self, key: str, body: Body) -> bool:
        if "/log/" in key and not self.condemned:
            self.condemned = _objects(self.inner)
            keys = map(ObjectKey.parse, self.condemned)
            assert self.inner.put_if_absent(epoch_key(1), encode_sweep(1, keys))
            with opened(self.inner) as registry:
                log = RunLog(registry.store, RUN)
                log.open()
                log.append(lambda state: [Mark(epoch=1)])
        return super().put_if_absent(key, body)


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
    assert len(_objects(store)) == 4
    # The next push finds all of it, and names none of it: it is condemned before the commit lands.
    swept = _SweptBeforeCommit(store)
    with opened(swept) as registry:
        registry.run(RUN).save(make_state(1), step=1)
    assert len(swept.condemned) == 4
    for key in swept.condemned:
        store.delete(key)
    with opened(store) as registry:
        assert_same(registry.checkpoint(RUN).load(), make_state(1))
        assert registry.verify(deep=True).findings == ()
    assert [ObjectKey.parse(key).generation for key in _objects(store)] == [1, 1, 1, 1]
