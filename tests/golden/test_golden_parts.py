"""Golden samples of a snapshot with parts: it is read, and made alike."""

from __future__ import annotations

from pathlib import Path

from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import PartedRun
from tests.golden import make_parts
from tests.support.lives import digest, place
from tests.support.stores import new_backend

FOLDER = Path(__file__).parent / "parts"


def _samples() -> dict[str, bytes]:
    found = (path for path in FOLDER.rglob("*") if path.is_file())
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in found}


def test_the_run_is_read_with_its_parts():
    """The slots before the snapshot are not there, so nothing else can tell of them."""
    backend = new_backend()
    for key, data in _samples().items():
        backend.put(key, data)
    with open_on(backend) as reg:
        log = RunLog(reg.handle.store, make_parts.RUN)
        run = log.open()
    assert isinstance(run, PartedRun)
    assert [one.step for one in run.live()] == [*range(1, make_parts.COUNT + 1)]
    assert run.by_n[5].metrics == {"m": 1.0}
    assert run.tags == {"t": 3}
    assert run.by_manifest[digest(7)] == place(digest(7))


def test_the_run_is_made_alike():
    backend = new_backend()
    make_parts.build(backend)
    assert make_parts.samples(backend) == _samples()
