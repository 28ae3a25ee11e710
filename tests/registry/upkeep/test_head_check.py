"""Heads in a file that an auditor keeps, held against the logs."""

from __future__ import annotations

import pytest

from holdfast import sync
from holdfast.registry.errors import InvalidInput
from tests.support.states import save_small, small_state
from tests.support.stores import contents, new_backend


@pytest.fixture
def saved(reg, run, tmp_path):
    """A file with the heads of `run`, of three commits, and of `other`."""
    save_small(run, 1, 2)
    reg.create_run("other", seed=2)
    assert reg.verify(write_heads=tmp_path / "heads").ok
    return tmp_path / "heads"


def findings(reg, file) -> list[tuple[str, str]]:
    return [(f.where, f.message) for f in reg.verify(heads=file).findings if f.kind == "head"]


def test_a_log_that_went_on_is_fine_here_and_at_a_mirror(reg, run, saved, open_registry):
    run.save(small_state(3), step=3)
    mirror = open_registry(new_backend("mirror-of-heads"))
    sync(reg, mirror)
    for one in (reg, mirror):
        report = one.verify(heads=saved)
        assert report.ok
        assert report.findings == ()


def test_shorter_gone_and_other_logs_are_findings(saved, backend, open_registry):
    for key in contents(backend, "runs/other/"):
        backend.delete(key)
    backend.delete("runs/run/log/00000000000000000002")
    assert findings(open_registry(backend), saved) == [
        ("other", f"the run is gone; {saved} has seen 1 commits of it"),
        ("run", f"the log has 2 commits; {saved} has seen 3: its end is gone"),
    ]
    with open_registry(backend) as reg:
        run = reg.run("run")
        run.restore()
        run.save(small_state(9), step=2)
        run.save(small_state(10), step=3)
    assert findings(open_registry(backend), saved)[1:] == [
        ("run", f"commit 2 is not the one that {saved} has seen")
    ]


def test_a_mark_that_is_gone_is_told_of_this_registry_alone(reg, run, backend, tmp_path):
    run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    run.exchange.push(small_state(3), step=3)
    reg.create_run("dead", seed=3).save(small_state(7), step=1)
    reg.run("dead").retention.drop("over", now=True)
    assert reg.gc(grace_s=0).epoch == 1  # puts a mark into the log of `run`
    reg.verify(write_heads=tmp_path / "heads")
    backend.delete(max(contents(backend, "runs/run/log/")))
    assert findings(reg, tmp_path / "heads") == [
        ("run", f"the log has 4 slots; {tmp_path / 'heads'} has seen 5: its end is gone")
    ]
    backend.delete("epochs/00000000000000000001")
    messages = [f.message for f in reg.verify(heads=tmp_path / "heads").findings]
    assert f"the log of epochs ends at 0; {tmp_path / 'heads'} has seen epoch 1" in messages


def test_nothing_is_written_where_something_is_wrong(reg, run, backend, tmp_path):
    run.save(small_state(1), step=1)
    backend.delete(max(contents(backend, "manifests/")))
    assert not reg.verify(write_heads=tmp_path / "heads").ok
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_none_is_refused_before_anything_is_read(reg, saved, tmp_path):
    saved.write_bytes(saved.read_bytes().replace(b'"commits":3', b'"commits":2'))
    with pytest.raises(InvalidInput, match="not a file of heads"):
        reg.verify(heads=saved)
    with pytest.raises(InvalidInput, match="cannot be read"):
        reg.verify(heads=tmp_path / "none")
    with pytest.raises(InvalidInput, match="cannot be written"):
        reg.verify(write_heads=tmp_path / "no" / "folder")
