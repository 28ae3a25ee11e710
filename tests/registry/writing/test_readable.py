"""What could not be read again is not saved: the bound is the same on both sides."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

import numpy as np
import pytest

from holdfast.backends import limits
from holdfast.registry.errors import BeyondLimit, InvalidInput, InvalidLocation, UnsupportedValue
from holdfast.registry.writing import packing
from tests.support.states import same
from tests.support.stores import contents, new_backend

#: States by a number that makes them larger.
STATES = {
    "values": lambda n: {"m": {"values": list(range(n))}, "w": np.arange(500)},
    "small tensors": lambda n: {"m": {f"{i}": np.float32([i]) for i in range(n)}},
    "tensors": lambda n: {"m": [np.full(40, i, np.int16) for i in range(n)], "w": np.arange(500)},
    "components": lambda n: {f"{i}": i for i in range(n)},
}
BOUND = 60_000


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch):
    def bound(size: int) -> None:
        monkeypatch.setenv(limits.VARIABLE, str(size))

    return bound


@pytest.mark.parametrize("name", STATES)
def test_a_state_at_the_bound_is_saved_and_loaded_and_one_beyond_it_is_neither(
    name, bound, open_registry
):
    make = STATES[name]

    @cache
    def refused(n: int) -> str:
        backend = new_backend()
        run = open_registry(backend).create_run("run")
        before = contents(backend)
        bound(BOUND)
        try:
            run.save(make(n), step=1)
        except InvalidInput as error:
            assert contents(backend) == before
            return str(error)
        finally:
            bound(limits.DEFAULT_BYTES)
        bound(BOUND)
        assert same(open_registry(backend).checkpoint("run/latest").load(), make(n))
        bound(limits.DEFAULT_BYTES)
        return ""

    least = bisect_left(range(BOUND), True, lo=1, hi=20_000, key=lambda n: bool(refused(n)))
    assert refused(least - 1) == ""
    assert limits.VARIABLE in refused(least)
    assert f"at most {BOUND} bytes" in refused(least)

    backend = new_backend()
    saved = open_registry(backend).create_run("run").save(make(least * 2), step=1)
    bound(BOUND)
    with pytest.raises(BeyondLimit, match=limits.VARIABLE):
        open_registry(backend).checkpoint("run/latest").load()
    with pytest.raises(BeyondLimit):  # and nothing older is put in its place
        open_registry(backend).run("run").restore()
    bound(BOUND * 10)
    assert same(open_registry(backend).checkpoint(saved.ref).load(), make(least * 2))


def test_the_manifest_itself_is_held_against_the_bound(run, backend, bound, monkeypatch):
    """Nothing is committed even where the first look let it pass."""
    monkeypatch.setattr(packing, "check_readable", lambda *_: None)
    bound(BOUND)
    with pytest.raises(InvalidInput, match="parsing it would take too much memory"):
        run.save(STATES["values"](20_000), step=1)
    bound(limits.DEFAULT_BYTES)
    assert run.checkpoints() == []


def test_a_merge_beyond_the_bound_is_refused(reg, bound):
    run = reg.create_run("run")
    parts = [run.save(STATES["small tensors"](n), step=n) for n in (100, 101)]
    averaged = {"a": run.exchange.push({"a": parts[0].load()["m"]}, step=1000)}
    bound(BOUND // 3)
    soup = reg.create_run("soup")
    with pytest.raises((InvalidInput, BeyondLimit), match=limits.VARIABLE):
        soup.exchange.merge([averaged["a"]], step=1)
    assert soup.checkpoints() == []


@pytest.mark.parametrize("field", ["meta", "metrics"])
def test_what_goes_into_the_log_is_held_against_the_bound(field, run, bound, backend):
    before = contents(backend)
    bound(BOUND)
    given = {"meta": list(range(20_000))} if field == "meta" else {}
    if field == "metrics":
        given = {"metrics": {f"metric{i}": 0.5 for i in range(2_000)}}
    with pytest.raises((UnsupportedValue, BeyondLimit), match=limits.VARIABLE):
        run.save({"m": 1}, step=1, **given)
    bound(limits.DEFAULT_BYTES)
    assert {key for key in contents(backend) if key.startswith("runs/")} == {
        key for key in before if key.startswith("runs/")
    }


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1 GiB", "9" * 19])
def test_a_bound_that_is_none_is_refused(value, bound, monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, value)
    with pytest.raises(InvalidLocation, match=f"{limits.VARIABLE}: not a number of bytes"):
        limits.max_record_bytes()
