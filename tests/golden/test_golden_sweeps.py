"""Golden samples of sweeps with tables: they are read, and made alike."""

from __future__ import annotations

from pathlib import Path

from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import Epochs
from tests.golden import make_sweeps
from tests.support.stores import contents, new_backend

FOLDER = Path(__file__).parent / "sweeps"


def _samples() -> dict[str, bytes]:
    found = (path for path in FOLDER.rglob("*") if path.is_file())
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in found}


def test_the_sweeps_are_read():
    backend = new_backend()
    for key, data in _samples().items():
        backend.put(key, data)
    with open_on(backend) as reg:
        epochs = Epochs(reg.handle.store)
        assert epochs.observe() == 3
        for epoch, keys in make_sweeps.SWEEPS.items():
            assert epochs.condemned_by(epoch, keys) == set(keys)
        every = [key for keys in make_sweeps.SWEEPS.values() for key in keys]
        others = {key for key in every if key.generation < 2} - set(make_sweeps.SWEEPS[2])
        assert epochs.condemned(every, 3) == {key for key in every if key.generation < 3}
        assert not epochs.condemned(others, 2)
        assert reg.verify(deep=True).findings == ()


def test_the_sweeps_are_made_alike():
    backend = new_backend()
    make_sweeps.build(backend)
    made = {key: data for key, data in contents(backend).items() if key != "registry.json"}
    assert made == _samples()
