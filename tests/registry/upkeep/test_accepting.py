"""A log that a mirror put back is shorter than collections have read: an operator accepts it."""

from __future__ import annotations

import itertools

import pytest

import holdfast
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import IntegrityError, NotFound, RolledBack
from holdfast.registry.face.factory import open_on
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend


def _without(backend, prefix: str) -> None:
    for info in list(backend.list(prefix)):
        backend.delete(info.key)


@pytest.fixture(params=["plain", "sealed"])
def put_back(request, open_registry):
    """A registry that lost a run of six saves, which a collection had read; a mirror had two."""
    backend = new_backend()
    reg = open_registry(backend)
    if request.param == "sealed":
        reg.upgrade()
    save_small(reg.create_run("x"), 1, 2)
    save_small(reg.create_run("other"), 3)
    with open_on(new_backend()) as copy:
        holdfast.sync(reg, copy)
        save_small(reg.run("x"), 3, 4, 5, 6)
        reg.gc(grace_s=0)
        reg.gc(grace_s=0)
        _without(backend, "runs/x/")
        with open_registry(backend) as lost, pytest.raises(RolledBack, match="gc --accept 'x'"):
            lost.gc(grace_s=0)
        with open_registry(backend) as fresh:
            holdfast.sync(copy, fresh, runs=["x"])
    return backend


def test_a_log_that_was_put_back_counts_once_it_is_accepted(put_back, open_registry):
    operator = open_registry(put_back)
    with pytest.raises(RolledBack, match="gc --accept 'x'"):
        operator.gc(grace_s=0)
    [finding] = operator.verify().findings
    assert "gc --accept 'x'" in finding.advice
    before = contents(put_back)
    planned = operator.gc(grace_s=0, accept=["x"], dry_run=True)
    assert (contents(put_back), planned.accepted) == (before, ("x",))
    report = operator.gc(grace_s=0, accept=["x"])
    # Also a reader who knows marks behind the lost seal finds more slots.
    assert operator.run("x").handle.log.length() > 16
    assert (report.accepted, report.deleted) == (("x",), planned.condemned)
    assert report.deleted.objects > 0  # what only the lost commits needed
    # From now on nobody has to say it again, on this machine or on another one.
    for full in (False, True):
        again = open_registry(put_back).gc(grace_s=0, full=full)
        assert (again.accepted, again.differing) == ((), ())
    assert open_registry(put_back).verify(deep=True).ok
    run = open_registry(put_back).run("x")
    for checkpoint in run.checkpoints():
        assert same(checkpoint.load(), small_state(checkpoint.step))
    save_small(run, 7)
    assert open_registry(put_back).gc(grace_s=0).deleted.objects == 0
    # A log that is lost again is missed again.
    _without(put_back, "runs/x/")
    with pytest.raises(RolledBack):
        open_registry(put_back).gc(grace_s=0)


def test_a_killed_acceptance_can_be_repeated(put_back, open_registry):
    for at in itertools.count(1):
        backend = put_back.copy()
        dying = open_on(Faulty(backend, [Fault(at=at)]))
        try:
            dying.gc(grace_s=0, accept=["x"])
        except InjectedCrash:
            dying.close()
        else:
            break
        open_registry(backend).gc(grace_s=0, accept=["x"])
        assert open_registry(backend).gc(grace_s=0).accepted == ()
        assert open_registry(backend).verify(deep=True).ok
    assert at > 6


def test_only_another_log_than_the_one_that_was_read_is_accepted(reg, backend):
    save_small(reg.create_run("x"), 1)
    with pytest.raises(NotFound, match="exists again"):
        reg.gc(accept=["x"])  # no collection has read it
    reg.gc()
    before = contents(backend)
    with pytest.raises(NotFound, match="exists again"):
        reg.gc(accept=["x", "y"])
    assert reg.gc(accept=["x"]).accepted == ()
    assert contents(backend) == before


@pytest.fixture(params=["whole", "end", "unread"])
def cut(request, open_registry):
    """A registry that lost slots of a run and not its snapshots; a mirror gave all commits back."""
    backend = new_backend()
    reg = open_registry(backend)
    save_small(run := reg.create_run("x"), *range(1, 11))
    if request.param == "whole":
        reg.gc(grace_s=0)
    save_small(run, *range(11, 25))
    if request.param == "end":
        reg.gc(grace_s=0)
        save_small(run, *range(25, 35))
    with open_on(new_backend()) as copy:
        holdfast.sync(reg, copy)
        slots = [info.key for info in backend.list("runs/x/log/")]
        for key in slots[0 if request.param == "whole" else 22 :]:
            backend.delete(key)
        assert next(backend.list("runs/x/snapshots/"))
        with open_registry(backend) as fresh:
            holdfast.sync(copy, fresh, runs=["x"])
    return backend


def test_a_log_that_ends_before_its_snapshots_counts_once_it_is_accepted(cut, open_registry):
    operator = open_registry(cut)
    with pytest.raises(IntegrityError, match="gc --accept 'x'"):
        operator.gc(grace_s=0)
    findings = operator.verify().findings
    assert findings
    assert all("gc --accept 'x'" in one.advice for one in findings)
    before = contents(cut)
    planned = operator.gc(grace_s=0, accept=["x"], dry_run=True)
    assert (contents(cut), planned.accepted) == (before, ("x",))
    assert operator.gc(grace_s=0, accept=["x"]).accepted == ("x",)
    for full in (False, True):
        again = open_registry(cut).gc(grace_s=0, full=full)
        assert (again.accepted, again.differing) == ((), ())
    assert open_registry(cut).verify(deep=True).ok
    for checkpoint in (run := open_registry(cut).run("x")).checkpoints():
        assert same(checkpoint.load(), small_state(checkpoint.step))
    save_small(run, 50)
    assert open_registry(cut).gc(grace_s=0).deleted.objects == 0
