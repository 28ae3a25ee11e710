"""The golden samples of journals are carried as they were acknowledged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.folder import run_folders
from holdfast.registry.saving.journal.settings import Journal

#: Three saves, the third by a program that restored the second, and the status at its end.
STEPS = (1, 2, 3)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_journal_of_each_version_is_carried(version: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "journal" / version, tmp_path / "it")
    ((registry_id, folder),) = run_folders(Journal(tmp_path / "it" / "journal"))
    entries = [entry for _, entry in folder.entries(folder.waiting())]
    assert [entry.save and entry.save.step for entry in entries] == [*STEPS, None]
    writes = [entry.write for entry in entries]
    followed = [None, None, None, None] if version == "v1" else [None, *writes[:-1]]
    assert [entry.follows for entry in entries] == followed
    with holdfast.open(tmp_path / "it" / "registry") as opened:
        assert opened.id == registry_id
        assert Carrier(opened.handle.store, folder).carry()
        run = opened.run("run")
        assert [one.step for one in run.checkpoints()] == list(STEPS)
        for one in run.checkpoints():
            expected = np.arange(1500, dtype=np.float32) + one.step
            assert one.load()["model"]["w"].tobytes() == expected.tobytes()
        assert run.status == "interrupted"
        assert run.checkpoints()[0].metrics == {"loss": 1.0}
        assert run.streams["losses"].read() == [{"step": 2}]
        assert [commit.write for commit in run.history.commits()][-4:] == writes
        assert opened.verify(deep=True).findings == ()
    assert folder.waiting() == []
