"""Folders of weights: an engine that pulls has each version, whole, from wherever it starts."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engines import FollowedVersion, WeightFolders
from holdfast.errors import Conflict, IncompatibleState, InvalidInput, StorageError
from holdfast.registry.face import Run
from holdfast.registry.formats import put_file
from holdfast.registry.hub.engines import folder, publishing
from tests.registry.hub.engines import lives
from tests.registry.hub.engines.conftest import Follow
from tests.registry.hub.engines.fakes import hash_of
from tests.registry.hub.engines.pulling import metadata
from tests.registry.hub.engines.pulling import pull as by_the_rules
from tests.registry.hub.engines.test_following import confirm
from tests.support.faults import Died

Pull = Callable[[Path, Path, int], None]


def sglangs_own() -> Pull:
    """Return the reader of SGLang, without its package, which needs a GPU's libraries."""
    found = PathFinder.find_spec("sglang")
    places = (found and found.submodule_search_locations) or ()
    for place in places:
        path = Path(place, "srt", "weight_sync", "local_checkpoint.py")
        if path.exists():
            spec = spec_from_file_location("local_checkpoint", path)
            assert spec is not None
            assert spec.loader is not None
            module: Any = module_from_spec(spec)
            spec.loader.exec_module(module)
            return lambda local, source, target: module.pull(
                str(local), "/none", str(source), target
            )
    pytest.skip("not installed: an SGLang with /pull_weights")


@pytest.fixture(params=["rules", "sglang"])
def pull(request: pytest.FixtureRequest) -> Pull:
    return by_the_rules if request.param == "rules" else sglangs_own()


def version(root: Path, step: int, n: int = 0, run: str = "llm", **more: Any) -> FollowedVersion:
    """Write the folder of a version, as a follower does."""
    folder = root / f"{step}"
    folder.mkdir()
    tensors = {**lives.weights(step), **more}
    for number in (0, 1):
        some = {one: tensors[one] for one in sorted(tensors)[number::2]}
        file = folder / f"model-{number}.safetensors"
        holdfast.formats.write(file, {"model": some}, {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "README.md").write_text(f"step {step}")
    (folder / ".holdfast").mkdir()  # of a published folder that was pushed into the run
    (folder / ".holdfast" / "version.json").write_text("{}")
    id_ = f"{step:064x}"
    made = FollowedVersion(
        folder=str(folder), run=run, ref=f"llm/main/step{step}", id=id_,
        phase="main", step=step, n=n or step,
    )  # fmt: skip
    (folder / "holdfast.json").write_text(json.dumps(made.to_json()))
    return made


def numbers(source: Path) -> list[int]:
    """Return the numbers of the folders that are there."""
    assert {path.name for path in source.iterdir()} >= {".lock", "latest"}
    return sorted(int(path.name.removeprefix("weight_v")) for path in source.glob("weight_v*"))


def pointed(source: Path) -> int:
    return int((source / "latest").read_text().removeprefix("weight_v"))


def newest(source: Path) -> int:
    number = pointed(source)
    assert number == numbers(source)[-1]
    return number


def is_whole(source: Path, number: int) -> bool:
    return "delta_encoding" not in metadata(source / f"weight_v{number:06d}")


def test_an_engine_that_pulls_has_each_version(tmp_path: Path, pull: Pull) -> None:
    source, wide = tmp_path / "shared", np.ones(7, np.float32)
    local, sleepy = tmp_path / "local", tmp_path / "sleepy"
    kinds = []
    with WeightFolders(source) as folders:
        for step in range(1, 10):
            # From step 6 there is one more tensor; at step 8 much changes.
            more: dict[str, Any] = {"wide": wide} if step >= 6 else {}
            if step >= 8:
                more |= {"layers.0.weight": np.full((64, 64), 1 / step, np.float32)}
                more |= {"layers.1.weight": np.full((64, 64), 2 / step, np.float32)}
            made = version(tmp_path, step, n=2 * step, **more)
            folders(made)
            folders(made)  # tried again
            pull(local, source, newest(source))
            assert hash_of(str(local)) == hash_of(made.folder)
            kinds.append(is_whole(source, newest(source)))
            late = tmp_path / f"late{step}"
            pull(late, source, newest(source))
            assert hash_of(str(late)) == hash_of(made.folder)
            if step in (3, 9):  # between them versions came and went
                pull(sleepy, source, newest(source))
                assert hash_of(str(sleepy)) == hash_of(made.folder)
    assert [step for step, one in enumerate(kinds, start=1) if one] == [1, 6, 8, 9]
    assert numbers(source) == [16, 18]  # whole ones have at least the number of the commit
    assert not (local / "README.md").exists()
    assert (local / "config.json").exists()


def test_a_folder_that_was_left_is_not_written_to_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is publishing is waited for; then the folder may have another follower."""
    source, put, writing = tmp_path / "shared", publishing.put_file, threading.Event()

    def slow(*given: Any) -> int:
        writing.set()
        time.sleep(0.05)
        return put(*given)

    first, second = version(tmp_path, 1), version(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "put_file", slow)
        with WeightFolders(source) as folders:
            thread = threading.Thread(target=folders, args=(first,))
            thread.start()
            assert writing.wait(60)
        assert newest(source) == 1  # left, and whole
        thread.join(60)
    with WeightFolders(source) as others:
        with pytest.raises(Conflict, match="left to other followers"):
            folders(second)
        others(second)
    assert numbers(source) == [1, 2]


def test_a_network_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(folder.fcntl, "flock", refused)
    with pytest.raises(StorageError, match="no locks here"):
        WeightFolders(tmp_path / "shared")


def test_a_small_change_is_small_and_old_folders_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kinds, sizes = tmp_path / "shared", [], []
    for step in range(1, 21):
        if step == 14:
            monkeypatch.setattr(publishing, "_MOST_DELTAS", 2)
        with WeightFolders(source) as folders:  # each time another process
            folders(version(tmp_path, step))
        last = source / (source / "latest").read_text()
        about = json.loads((last / ".holdfast/version.json").read_text())
        kinds.append(about["is_whole"])
        sizes.append(sum(path.stat().st_size for path in last.glob("*") if path.is_file()))
        assert sizes[-1] == about["size_bytes"]
        assert about["is_whole"] == is_whole(source, step)
    wholes = [number for number, one in enumerate(kinds, start=1) if one]
    assert (
        min(sizes[number - 1] for number in wholes)
        > 64 * 64 * 4 * 4
        > 8 * max(size for size, one in zip(sizes, kinds, strict=True) if not one)
    )
    # The deltas after a whole version are no larger than that, and later no more than two.
    assert wholes == [1, second := wholes[1], 15, 18]
    assert sum(sizes[1 : second - 1]) <= sizes[0] < sum(sizes[1:second])
    assert numbers(source) == [*range(15, 21)]


def test_changes_are_looked_for_on_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, real = [], ThreadPoolExecutor

    def spy(threads: int) -> ThreadPoolExecutor:
        asked.append(threads)
        return real(threads)

    head = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    old, new = tmp_path / "old", tmp_path / "new"
    for path, data in ((old, bytes(64)), (new, bytes([1, *bytes(63)]))):
        path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    monkeypatch.setattr(publishing, "ThreadPoolExecutor", spy)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for bound, expected in ((3, 3), (48, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, bound=bound: range(bound))
        assert publishing._changes(old, new)[1] == ["w"]
        assert asked.pop() == expected


def test_a_follower_publishes_and_goes_on_after_a_restart(
    run: Run, follow: Follow, tmp_path: Path
) -> None:
    source, local, steps = tmp_path / "shared", tmp_path / "local", itertools.count(1)
    for _ in range(2):
        with WeightFolders(source) as folders:
            follower = follow([], notify=folders)
            for step in itertools.islice(steps, 2):
                run.save({"model": lives.weights(step)}, step=step)
                follower.poll()
                confirm(follower)
                by_the_rules(local, source, newest(source))
                assert hash_of(str(local)) == lives.hash_at(step)
            follower.close()
    assert [is_whole(source, one) for one in numbers(source)] == [True, False, False, False]


def test_an_adapter_alone_is_not_published(run: Run, follow: Follow, tmp_path: Path) -> None:
    run.save({"adapter": {"a": np.ones((2, 3), np.float32)}}, step=1)
    with WeightFolders(tmp_path / "shared") as folders:
        follower = follow([], notify=folders)
        with pytest.raises(IncompatibleState, match="no model"):
            follower.poll()
        follower.close()


def test_whoever_is_killed_leaves_whole_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher dies before each of its writes, the reader before each tensor."""
    source, local = tmp_path / "shared", tmp_path / "local"
    left = [0]

    def dying(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise Died
        return put_file(*given)

    for module in (publishing, folder):
        monkeypatch.setattr(module, "put_file", dying)
    deaths = 0
    for step in range(1, 4):
        made = version(tmp_path, step)
        for most in itertools.count():
            left[0] = most
            try:
                with WeightFolders(source) as folders:
                    folders(made)
                break
            except Died:
                deaths += 1
            if step > 1:
                by_the_rules(local, source, pointed(source))  # it may not name the newest yet
                assert hash_of(str(local)) == lives.hash_at(step - 1)
        for most in itertools.count():
            left[0] = most

            def each(name: str) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Died

            try:
                by_the_rules(local, source, newest(source), each)
                break
            except Died:
                deaths += 1
        assert hash_of(str(local)) == lives.hash_at(step)
    assert deaths > 15
    assert not [*source.glob(".new*")]


def test_a_folder_that_is_gone_or_changed_makes_a_whole_version(tmp_path: Path) -> None:
    source, kinds, other = tmp_path / "shared", [], version(tmp_path, 9)
    with WeightFolders(source) as folders:
        for step in (1, 2, 3, 4):
            made = version(tmp_path, step)
            folders(made)
            kinds.append(is_whole(source, newest(source)))
            if step == 1:
                shutil.rmtree(tmp_path / "1")
            elif step == 2:
                shutil.copy(other.folder + "/holdfast.json", made.folder)
    assert kinds == [True, True, True, False]


def test_what_is_not_a_folder_of_weights_is_refused(tmp_path: Path) -> None:
    source, made = tmp_path / "shared", version(tmp_path, 1)
    with WeightFolders(source) as folders:
        folders(made)
        with pytest.raises(Conflict, match="another follower"):
            WeightFolders(source)
        with pytest.raises(Conflict, match="another run"):
            folders(version(tmp_path, 2, run="other"))
    strange = shutil.copytree(source / "weight_v000001", source / "weight_v000002")
    for _ in range(2):  # it says another number, and then nothing
        with pytest.raises(Conflict, match="not a folder of a follower"):
            WeightFolders(source)
        shutil.rmtree(strange / ".holdfast", ignore_errors=True)
    (source / "mine.txt").touch()
    with pytest.raises(InvalidInput, match=r"mine\.txt"):
        WeightFolders(source)
    with pytest.raises(InvalidInput, match="not a folder"):
        WeightFolders(source / "mine.txt")


def test_the_pointer_is_durable_once_a_version_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, names, fsync = set[int](), dict[int, dict[str, int]](), os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = {one.name: one.inode() for one in os.scandir(fd)}
        else:
            files.add(found.st_ino)

    root = tmp_path / "shared"
    with WeightFolders(root) as folders:
        monkeypatch.setattr(os, "fsync", note)
        for step in (1, 2):
            folders(version(tmp_path, step))
            (root / ".new-latest").write_text("of one that died")
            pointer = (root / "latest").stat().st_ino
            assert pointer in files
            assert names[root.stat().st_ino]["latest"] == pointer
