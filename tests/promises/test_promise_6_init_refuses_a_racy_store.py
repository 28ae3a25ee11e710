"""Promise 6: `init` races put-if-absent and refuses a store that lets two writers win."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import holdfast
from holdfast.backends import Body
from holdfast.registry.errors import NotFound, StoreUnsuitable
from tests.support.stores import Scratch


class _ChecksThenWrites(Scratch):
    """A store that makes of put-if-absent two steps, with room for a second writer between them."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        if any(info.key == key for info in self.list(key)):
            return False
        time.sleep(0.001)
        self.put(key, body)
        return True


class _ForgetsTheCondition(Scratch):
    """A store that ignores `If-None-Match`."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        self.put(key, body)
        return True


@pytest.mark.parametrize("racy", [_ChecksThenWrites, _ForgetsTheCondition])
def test_promise_6_init_refuses_a_racy_store(
    racy: type[Scratch], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = racy()
    monkeypatch.setattr("holdfast.registry.store.address.open_backend", lambda *_: backend)
    with pytest.raises(StoreUnsuitable, match="writers created one key"):
        holdfast.init("s3://bucket/prefix")
    assert list(backend.list()) == []
    with pytest.raises(NotFound):
        holdfast.open("s3://bucket/prefix")


def test_promise_6_init_accepts_a_store_that_has_one_winner(tmp_path: Path) -> None:
    with holdfast.init(tmp_path) as reg:
        assert reg.handle.store.config.race_probe == "passed"
        assert [info.key for info in reg.handle.store.backend.list()] == ["registry.json"]
