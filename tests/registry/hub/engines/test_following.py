"""Engines at the newest version of a run: one version, whole, never an older one."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Retention, Storing
from holdfast.backends import Backend
from holdfast.backends.errors import StoreUnavailable
from holdfast.engines import EngineFollower, FollowedVersion
from holdfast.errors import (
    Conflict,
    Damaged,
    IncompatibleState,
    InvalidInput,
    StorageError,
    StoreFull,
)
from holdfast.registry.face import Run, open_on
from holdfast.registry.history.actions import Rewind
from holdfast.registry.hub.engines import folder as folder_module
from holdfast.registry.hub.engines import following
from holdfast.registry.values.figures import HERE
from tests.registry.hub.engines.conftest import (
    Follow,
    Start,
    hash_at,
    stop,
    train,
    until,
    weights,
)
from tests.registry.hub.engines.fakes import VLLM, SGLang, hash_of
from tests.support.faults import Died, Hooked, flip


def loads(*engines: Any) -> list[tuple[str, str]]:
    """Return the versions and digests of all loads of engines with one log."""
    lines = [json.loads(line) for line in engines[0].log.read_text().splitlines()]
    return [(one["version"], one["hash"]) for one in lines]


def _is_at(follower: EngineFollower, version: FollowedVersion | None) -> bool:
    return follower.confirmed()[0] == version


def _has(engine: Any, step: int) -> bool:
    return bool(engine.hash == hash_at(step))


def confirm(follower: EngineFollower) -> FollowedVersion:
    """Wait until every engine has the version."""
    until(lambda: all(one == follower.version for one in follower.confirmed()))
    assert follower.version is not None
    return follower.version


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("requests", ["wait", "pause", "abort"])
def test_an_engine_loads_each_version_and_says_so(
    run: Run,
    start: Start,
    follow: Follow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    requests: Any,
) -> None:
    monkeypatch.setattr(HERE, "_values", {})  # other tests of this process have engines, too
    train(run, 1)
    engine = start(kind)
    follower = follow([engine], notify=kind, requests=requests, key="s3cret")
    ids = []
    for step in (1, 2, 3):
        train(run, *([step] if step > 1 else []))
        made = follower.poll()
        assert made is not None
        assert confirm(follower) == made
        ids.append(made.id)
        assert hash_of(str(made.folder)) == engine.hash == hash_at(step)
    assert loads(engine) == [(one, hash_at(step)) for step, one in enumerate(ids, start=1)]
    assert (follower.poll(), engine.paused) == (None, False)
    assert {headers["Authorization"] for _, _, headers in engine.asked} == {"Bearer s3cret"}

    status = json.loads((tmp_path / "models" / "status.json").read_text())
    assert status["version"]["id"] == status["engines"][0]["confirmed"]["id"] == ids[-1]
    assert status["engines"][0]["engine"] == engine.url
    assert HERE.read(runs=False)["engine_confirmed_info"] == {("0", ids[-1]): 1}
    posted = [(path, body) for path, body, _ in engine.asked]
    if kind == "sglang":
        bodies = [one for path, one in posted if path == "/update_weights_from_disk"]
        assert [one["abort_all_requests"] for one in bodies] == 3 * [requests == "abort"]
        paused = 3 * [("/pause_generation", {"mode": "retract"})] if requests == "pause" else []
        assert [one for one in posted if one[0] == "/pause_generation"] == paused
    else:
        mode = {"wait": "wait", "pause": "keep", "abort": "abort"}[requests]
        frozen = "?reset_running_requests=true" if requests == "pause" else ""
        paths = [path for path, _ in posted if path != "/weight_info"][:6]
        assert paths == [
            *(f"/pause?mode={mode}", "/update_weight_version", "/collective_rpc"),
            *(f"/reset_prefix_cache{frozen}", "/update_weight_version", "/resume"),
        ]


def test_the_files_are_whole_and_current_leads_to_them(
    run: Run, start: Start, follow: Follow, tmp_path: Path
) -> None:
    train(run, 1, 2)
    follower = follow([start("sglang")])
    made = follower.poll()
    current = tmp_path / "models" / "current"
    names = {one.name for one in current.iterdir()}
    assert made is not None
    assert str(current.resolve()) == made.folder
    assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} < names
    about = json.loads((current / "holdfast.json").read_text())
    assert (about["id"], about["step"], about["n"]) == (made.id, 2, made.n)
    confirm(follower)
    for step in (3, 4, 5):  # the folder of a version goes when no engine needs it
        train(run, step)
        follower.poll()
        confirm(follower)
    assert len(list((tmp_path / "models" / "versions").iterdir())) == 2
    assert not Path(made.folder).exists()


def test_of_a_little_that_changed_little_is_fetched(
    run: Run, start: Start, follow: Follow, backend: Backend, tmp_path: Path
) -> None:
    """With 1.3 % of the bf16 elements changed, a new process, too, reads at most 2 % of bytes."""
    random = torch.Generator().manual_seed(7)
    masters = torch.randn((1024, 1024), generator=random) * 0.02
    storing = Storing(compression="zstd", keyframe_every=4)

    def step(number: int) -> float:
        before = masters.bfloat16()
        masters.add_(torch.randn(masters.shape, generator=random).sign_(), alpha=2.6e-7)
        run.save({"model": {"w": masters.bfloat16()}}, step=number, storing=storing)
        return float((before != masters.bfloat16()).float().mean())

    step(1)
    engine = start("sglang")
    first = follow([engine])
    first.poll()
    size = masters.numel() * 2
    assert first._folder.moved_bytes > size / 2
    for number in range(2, 8):  # the chain begins again on the way
        if number == 4:  # another process, which knows only the folder
            first.close()
            first = follow([engine])
        assert 0.01 < step(number) < 0.02
        first.poll()
        assert 0.002 < first._folder.moved_bytes / size < 0.02
        confirm(first)
    # A late joiner makes one version, of which it reads the chunks and the few deltas to them.
    late = follow([start("sglang")], into=tmp_path / "late")
    late.poll()
    assert late._folder.moved_bytes < 1.1 * size
    assert len(list((tmp_path / "late" / "versions").iterdir())) == 1


def test_never_backwards_unless_told(
    run: Run, start: Start, follow: Follow, tmp_path: Path
) -> None:
    said: list[str] = []
    engine = start("sglang")
    train(run, 1, 2)
    follower = follow([engine], note=said.append)
    follower.poll()
    there = confirm(follower)
    first = run.checkpoints()[0]
    run.handle.committer.commit(lambda state: [Rewind(to=first.handle.n)])
    assert (follower.poll(), follower.poll()) == (None, None)  # `latest` is step 1 now
    run.restore(first)
    train(run, 3)  # trained on from step 1: newer by the log
    made = follower.poll()
    assert made is not None
    assert confirm(follower).n > there.n
    follower.close()

    best = follow([engine], best=True, note=said.append)  # as a process that starts again
    first.report({"loss": 0.1})
    assert (best.poll(), best.poll()) == (None, None)
    assert [first.digest.short in line for line in said if "is older" in line] == [True, True]
    best.close()
    back = follow([engine], best=True, backwards=True)
    made = back.poll()
    assert made is not None
    assert made.step == 1
    confirm(back)
    assert engine.hash == hash_at(1)


def test_a_dead_engine_holds_nobody_up_and_gets_the_newest_when_it_is_back(
    run: Run, start: Start, follow: Follow
) -> None:
    live, dead = start("sglang"), start("sglang")
    dead.log = live.log.with_name("dead")
    stop(dead)
    train(run, 1)
    follower = follow([live, dead])
    for step in (1, 2, 3):
        train(run, *([step] if step > 1 else []))
        made = follower.poll()
        until(partial(_is_at, follower, made))
    assert follower.confirmed()[1] is None
    back = start("sglang", dead.server_port)
    back.log = dead.log
    assert confirm(follower).step == 3
    assert [digest for _, digest in loads(back)] == [hash_at(3)]


def test_a_restarted_follower_keeps_what_a_late_engine_may_still_have(
    run: Run, start: Start, follow: Follow
) -> None:
    engine = start("sglang")
    train(run, 1)
    follower = follow([engine])
    follower.poll()
    first = Path(confirm(follower).folder)
    stop(engine)
    train(run, 2)
    follower.poll()
    follower.close()
    again = follow([engine])
    assert first.is_dir()
    start("sglang", engine.server_port).log = engine.log
    confirm(again)
    train(run, 3)
    again.poll()
    assert not first.exists()


@pytest.mark.sometimes("an engine was started again")
def test_an_engine_that_was_started_again_is_told_again(
    run: Run, start: Start, follow: Follow
) -> None:
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine])
    follower.poll()
    confirm(follower)
    engine.version, engine.hash = "default", ""  # it has what it was started with
    until(lambda: engine.hash == hash_at(1))
    assert len(loads(engine)) == 2


def test_a_vllm_that_may_have_loaded_half_stays_paused_until_a_reload_succeeds(
    run: Run, start: Start, follow: Follow
) -> None:
    class Breaking(VLLM):
        breaks = True

        def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
            if path == "/collective_rpc" and self.breaks:
                self.hash = "a mix"
                return 500, {"error": "out of memory with s3cret"}
            return super().act(path, query, body)

    train(run, 1)
    engine: Any = start(Breaking)
    said: list[str] = []
    follower = follow([engine], notify="vllm", note=said.append, key="s3cret")
    follower.poll()
    until(lambda: said)
    assert engine.paused
    assert "out of memory with ***" in said[0]
    assert not any("s3cret" in line for line in said)
    engine.breaks = False
    confirm(follower)
    assert (engine.paused, engine.hash) == (False, hash_at(1))


@pytest.mark.parametrize(
    ("kind", "path", "requests"),
    [(VLLM, "/resume", "wait"), (SGLang, "/continue_generation", "pause")],
)
def test_an_engine_that_is_paused_after_its_load_goes_on(
    run: Run, start: Start, follow: Follow, kind: Any, path: str, requests: Any
) -> None:
    """The last request of a try fails, and in another process that ends then."""

    class Stuck(kind):  # type: ignore[misc]
        def act(self, asked: str, query: str, body: Any) -> tuple[int, Any]:
            if asked == path and self.sticks:
                self.sticks -= 1
                return 500, {"error": "busy"}
            return super().act(asked, query, body)  # type: ignore[no-any-return]

    train(run, 1)
    engine: Any = start(Stuck)
    engine.sticks = 1
    given = {"notify": kind.__name__.lower(), "requests": requests}
    follower = follow([engine], **given)
    follower.poll()
    confirm(follower)
    assert not engine.paused
    follower.close()
    engine.paused = True  # as a follower that was killed leaves it
    again = follow([engine], **given)
    confirm(again)
    assert not engine.paused
    assert [digest for _, digest in loads(engine)] == [hash_at(1)]


def test_a_vllm_with_half_a_version_is_told_again_of_the_one_that_it_had(
    run: Run, start: Start, follow: Follow
) -> None:
    class Breaking(VLLM):
        breaks = False

        def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
            if path == "/collective_rpc" and self.breaks:
                self.hash = "a mix"
                return 500, {"error": "out of memory"}
            return super().act(path, query, body)

    train(run, 1, metrics={"loss": 1.0})
    engine: Any = start(Breaking)
    follower = follow([engine], notify="vllm", best=True, backwards=True)
    follower.poll()
    confirm(follower)
    engine.breaks = True
    train(run, 2, metrics={"loss": 0.5})
    follower.poll()
    until(lambda: engine.hash == "a mix")
    run.checkpoints()[0].report({"loss": 0.1})
    follower.poll()
    engine.breaks = False
    assert confirm(follower).step == 1
    assert (engine.paused, engine.hash) == (False, hash_at(1))


@pytest.mark.parametrize("at", range(1, 9))
def test_a_follower_that_dies_anywhere_leaves_one_whole_version(
    run: Run,
    start: Start,
    follow: Follow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine])
    follower.poll()
    confirm(follower)
    train(run, 2)
    calls = 0

    def dying(real: Any) -> Any:
        def act(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Died
            return real(*given)

        return act

    with monkeypatch.context() as patch:
        for name in ("put_file", "sync_folder"):
            patch.setattr(folder_module, name, dying(getattr(folder_module, name)))
        with suppress(Died):
            follower.poll()
    assert calls >= at
    step = hash_of(str(tmp_path / "models" / "current"))
    assert step in (hash_at(1), hash_at(2))
    follower.close()
    again = follow([engine])
    again.poll()
    assert confirm(again).step == 2
    assert [digest for _, digest in loads(engine)] == [hash_at(1), hash_at(2)]


def test_damage_is_told_and_waited_out_and_never_loaded(
    run: Run, start: Start, follow: Follow, backend: Backend
) -> None:
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine])
    follower.poll()
    confirm(follower)
    before = {info.key for info in backend.list("packs/")}
    train(run, 2)
    (key,) = {info.key for info in backend.list("packs/")} - before
    flip(backend, key)
    with pytest.raises(Damaged):
        follower.poll()
    loop = threading.Thread(target=follower.run)
    loop.start()
    status = Path(follower.version.folder).parents[1] / "status.json"  # type: ignore[union-attr]
    until(lambda: json.loads(status.read_text())["error"])
    until(lambda: json.loads(status.read_text())["damage"]["tries"] > 1)
    flip(backend, key)  # repaired
    until(lambda: engine.hash == hash_at(2))
    run.status = "completed"
    loop.join(60)
    assert not loop.is_alive()
    assert [digest for _, digest in loads(engine)] == [hash_at(1), hash_at(2)]


def test_a_damaged_version_is_fetched_at_most_every_five_minutes(
    run: Run, start: Start, follow: Follow, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours of looks at the log, 30 s apart; a newer version comes at once."""
    clock, gets = SimpleNamespace(now_s=0.0), list[str]()
    monkeypatch.setattr(following, "_monotonic", lambda: clock.now_s)
    train(run, 1)
    (key,) = (info.key for info in backend.list("packs/"))
    flip(backend, key)
    hooked = Hooked(backend)
    hooked.before = lambda method, key: gets.append(key) if method.startswith("get") else None
    follower = follow([start("sglang")], on=hooked)
    monkeypatch.setattr(following, "_BACKOFF_S", 1.0)
    for _ in range(240):
        with pytest.raises(Damaged):
            follower.poll()
        clock.now_s += 30
    assert 24 <= gets.count(key) <= 100  # each try reads it twice
    flip(backend, key)  # repaired
    clock.now_s += following._LONGEST_DAMAGE_S
    assert getattr(follower.poll(), "step", None) == 1
    (before,) = (info.key for info in backend.list("packs/"))
    train(run, 2)
    (key,) = {info.key for info in backend.list("packs/")} - {before}
    flip(backend, key)
    with pytest.raises(Damaged):
        follower.poll()
    train(run, 3)
    assert getattr(follower.poll(), "step", None) == 3


def test_a_store_that_fails_is_waited_out(
    run: Run, start: Start, follow: Follow, backend: Backend
) -> None:
    """Every fifth request fails, for ever: the versions come nevertheless."""
    hooked, asked = Hooked(backend), 0

    def fail(method: str, key: str) -> None:
        nonlocal asked
        asked += 1
        if is_on and asked % 5 == 0:
            raise StoreUnavailable("no answer", where=key)

    is_on, hooked.before = False, fail
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine], on=hooked)
    is_on = True
    loop = threading.Thread(target=follower.run)
    loop.start()
    for step in (1, 2, 3):
        train(run, *([step] if step > 1 else []))
        until(partial(_has, engine, step))
    run.status = "completed"
    loop.join(60)
    assert not loop.is_alive()


def test_a_changed_file_of_the_version_here_is_not_taken_over(
    run: Run, start: Start, follow: Follow
) -> None:
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine])
    made = follower.poll()
    assert made is not None
    confirm(follower)
    for path in Path(made.folder).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1  # of the first tensor, also the fixed one
        path.write_bytes(data)
    shutil.copy(path, path.with_name("x.safetensors"))
    train(run, 2)
    follower.poll()
    confirm(follower)
    assert engine.hash == hash_at(2)


def test_one_entry_for_all_engines_and_at_most_one_a_minute(
    run: Run, start: Start, follow: Follow, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(following, "_monotonic", lambda: now_s)
    train(run, 1)
    owner = run.handle.log.owner()
    follower = follow([start("sglang"), start("sglang")], on=backend, report=True)
    for step in (1, 2, 3):
        train(run, *([step] if step > 1 else []))
        follower.poll()
        confirm(follower)
        follower._report()
    read = run.streams["engines"].read
    assert [(one["step"], one["confirmed"], one["engines"]) for one in read()] == [(1, 2, 2)]
    now_s += 60
    follower._report()
    follower._report()
    entries = read()
    assert [one["step"] for one in entries] == [1, 3]
    assert entries[1]["id"] == follower.version.id  # type: ignore[union-attr]
    assert run.handle.log.owner() == owner  # it took no run over
    train(run, 4)  # and the trainer goes on


def test_without_room_nothing_is_fetched_and_nothing_stays(
    run: Run, follow: Follow, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run, 1)
    hooked, reads = Hooked(backend), list[str]()
    follower = follow([], notify=lambda version: None, urls=[], on=hooked)
    hooked.before = lambda method, key: reads.append(key)
    with monkeypatch.context() as patch:
        patch.setattr(folder_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=99))
        with pytest.raises(StoreFull, match="no room for one more version"):
            follower.poll()
        assert not [key for key in reads if key.startswith("packs/")]
        patch.undo()
        patch.setattr(folder_module, "sync_folder", raising(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StoreFull, match="full"):
            follower.poll()
    assert [*(tmp_path / "models" / "versions").iterdir()] == []
    assert follower.poll() is not None


def test_a_folder_that_somebody_removed_is_told(run: Run, follow: Follow, tmp_path: Path) -> None:
    train(run, 1)
    follower = follow([], notify=lambda version: None, urls=[])
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(StorageError, match="models"):
        follower.poll()


def raising(error: Exception) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


def test_every_folder_of_a_version_is_synced(
    run: Run, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[str]()
    run.save({"model": weights(1), "json": {"a/b/c.json": {}}, "files": {}}, step=1)
    follower = follow([], notify=lambda version: None, urls=[])
    monkeypatch.setattr(folder_module, "sync_folder", lambda path: synced.add(path.name))
    follower.poll()
    assert synced >= {".new", "a", "b", "versions", "models"}


def test_a_closed_follower_leaves_the_folder_alone(
    run: Run, start: Start, follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(SGLang):
        def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
            if path == "/update_weights_from_disk":
                assert gate.wait(60)
            return super().act(path, query, body)

    gate, loading, status = threading.Event(), start(Slow), tmp_path / "models" / "status.json"
    train(run, 1)
    first = follow([loading])
    first.poll()
    until(lambda: any(path == "/update_weights_from_disk" for path, *_ in loading.asked))
    first.close()
    with pytest.raises(Conflict, match="the follower is closed"):
        train(run, 2)
        first.poll()
    again = follow([start("sglang")])
    again.poll()
    confirm(again)
    before = status.read_text()
    gate.set()
    until(lambda: _is_at(first, first.version))  # its thread was still waiting for the engine
    assert status.read_text() == before
    train(run, 3)
    put, writing = folder_module.put_file, threading.Event()

    def slow(*given: Any) -> int:
        writing.set()
        time.sleep(0.05)
        return put(*given)

    monkeypatch.setattr(folder_module, "put_file", slow)
    polled = threading.Thread(target=again.poll)
    polled.start()
    assert writing.wait(60)
    again.close()  # waits for the version
    assert hash_of(str(tmp_path / "models" / "current")) == hash_at(3)
    polled.join(60)


def test_a_follower_that_waits_ends_when_it_is_closed(run: Run, follow: Follow) -> None:
    train(run, 1)
    follower = follow([], notify=lambda version: None, poll_s=1000.0)
    following_it = threading.Thread(target=follower.run, daemon=True)
    following_it.start()
    until(lambda: follower.version is not None and follower.confirmed() == [follower.version])
    follower.close()
    following_it.join(20)
    assert not following_it.is_alive()


def test_folders_of_others_are_refused(
    run: Run, start: Start, follow: Follow, backend: Backend, tmp_path: Path
) -> None:
    train(run, 1)
    engine = start("sglang")
    follower = follow([engine])
    follower.poll()
    with pytest.raises(Conflict, match="another follower has this folder"):
        follow([engine])
    follower.close()
    with open_on(backend) as reg, pytest.raises(Conflict, match="not a folder of this follower"):
        other = reg.create_run("other")
        EngineFollower(other, tmp_path / "models", notify="sglang", urls=[engine.url])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match=r"the folder has other files"):
        follow([engine], into=mine)
    (mine / "thesis.tex").unlink()
    (mine / "current").symlink_to("/etc")
    with pytest.raises(Conflict, match="not a folder of this follower"):
        follow([engine], into=mine)
    assert (mine / "current").is_symlink()


def test_a_state_without_weights_is_refused_at_first_and_later_told(
    run: Run, start: Start, follow: Follow
) -> None:
    run.save({"step": 1}, step=1)
    engine = start("sglang")
    follower = follow([engine], follow=False)
    with pytest.raises(IncompatibleState, match="no weights"):
        follower.run()
    train(run, 2)
    follower.run()
    run.save({"step": 3}, step=3)
    said: list[str] = []
    follower.close()
    follower = follow([engine], note=said.append)
    loop = threading.Thread(target=follower.run)
    loop.start()
    until(lambda: any("no weights" in line for line in said))
    names = {"config.json": {}, "Config.json": {}}
    run.save({"model": weights(4), "configs": names}, step=4)
    until(lambda: any("one file on some systems" in line for line in said))
    train(run, 5)
    until(lambda: engine.hash == hash_at(5))
    run.status = "completed"
    loop.join(60)
    assert not loop.is_alive()


@pytest.mark.sometimes("a version is gone while a follower fetches it")
def test_an_evicted_version_is_passed_over(
    run: Run, start: Start, follow: Follow, backend: Backend
) -> None:
    """The checkpoint goes while its files are written: the next one is taken."""

    def save(step: int) -> None:
        state = {"model": {"w": np.full(300, step, np.float32)}}
        run.save(state, step=step, metrics={"loss": 1 / step})

    save(1)
    hooked, gone = Hooked(backend), False

    def collect(method: str, key: str) -> None:
        nonlocal gone
        if key.startswith("packs/") and not gone:
            gone = True
            save(2)
            run.retention.prune(Retention(last=1))
            for info in list(backend.list(key)):
                backend.delete(info.key)

    follower = follow([start("sglang")], on=hooked)
    hooked.before = collect
    made = follower.poll()
    assert made is not None
    assert made.step == 2


def test_a_call_instead_of_an_engine_is_repeated_until_it_succeeds(
    run: Run, follow: Follow
) -> None:
    train(run, 1)
    told: list[FollowedVersion] = []

    def call(version: FollowedVersion) -> None:
        told.append(version)
        if len(told) < 3:
            raise ValueError("not yet")

    follower = follow([], notify=call, urls=[])
    follower.poll()
    assert confirm(follower).folder == told[-1].folder
    assert len(told) == 3
    assert weights(1).keys() == {"l0.weight", "l1.weight", "l2.weight", "fixed.weight"}
    with pytest.raises(InvalidInput, match="no URL and no key"):
        follow([], notify=call, urls=["http://127.0.0.1:1"])


def test_the_public_names_are_these() -> None:
    assert holdfast.engines.__all__ == ["EngineFollower", "FollowedVersion", "WeightFolders"]
