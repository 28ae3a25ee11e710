"""Promise 1: an acknowledged commit survives SIGKILL; on a local disk also loss of power."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from tests.crash.pusher import push_until_killed, state_at
from tests.support.pictures import RUN
from tests.support.processes import start_telling
from tests.support.sameness import assert_same


@pytest.mark.xdist_group("forked")
def test_promise_1_acknowledged_commit_survives_kill(tmp_path: Path) -> None:
    holdfast.init(tmp_path, skip_race_probe=True).close()
    pusher, acks = start_telling(push_until_killed, str(tmp_path))
    told = [acks.recv() for _ in range(3)]
    pusher.kill()
    pusher.join()
    with holdfast.open(tmp_path) as reg:
        for step in (step for event, step in told if event == "saved"):
            assert_same(reg.checkpoint(f"{RUN}/main/step{step}").load(), state_at(step))
        assert reg.verify(deep=True).ok


def test_promise_1_every_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    named: list[Path] = []
    sync, link = os.fsync, os.link

    def noted_sync(fd: int) -> None:
        sync(fd)
        synced.append(os.fstat(fd).st_ino)

    def noted_link(source: str, name: str, *, dst_dir_fd: int) -> None:
        target = Path(f"/proc/self/fd/{dst_dir_fd}").readlink() / name
        assert Path(source).stat().st_ino in synced  # before it can be seen
        if target.parent.name == "log":
            # What a commit names is there for good, names and bytes, before the commit is.
            assert all(path.stat().st_ino in synced for path in named)
            assert all(path.parent.stat().st_ino in synced for path in named)
        link(source, name, dst_dir_fd=dst_dir_fd)
        named.append(target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "link", noted_link)
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as reg:
        run = reg.create_run(RUN, seed=1)
        run.save(state_at(1), step=1)
        assert named[-1].parent.name == "log"
        assert named[-1].parent.stat().st_ino == synced[-1]  # durable on return
    assert len(named) == 7  # configuration, run, two packs, manifest, placement, commit
