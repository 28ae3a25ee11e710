"""The write path: only what is new is sent, in packs that depend on the state alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PACK_BYTES, open_pack
from holdfast.registry.objects.tensor_entry import LIST_THRESHOLD
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.values.digest import Digest
from tests.support.states import same, small_state
from tests.support.stores import contents, new_backend, objects, packs, packs_of, small_grid

MIB = 2**20


def chunks_of(backend, key: str) -> list[bytes]:
    data = backend.get(key)
    table = open_pack(data, ObjectKey.parse(key).digest, where=key)
    return [data[e.offset : e.offset + e.stored_bytes] for e in table]


def stored_chunks(backend) -> list[bytes]:
    keys = sorted(packs(backend))
    return [chunk for key in keys for chunk in chunks_of(backend, key)]


def many(count: int = 500) -> dict:
    rng = np.random.default_rng(0)
    return {"model": {f"w{i}": rng.integers(0, 2**31, 40) for i in range(count)}}


# Only what is new


def test_an_unchanged_state_uploads_no_object_but_the_slot(backend, open_registry):
    metered = Metered(backend)
    run = open_registry(metered).create_run("run")
    run.save(small_state(), step=1)
    before = contents(backend)
    with metered.measure() as usage:
        run.save(small_state(), step=2)
    added = contents(backend).keys() - before.keys()
    assert added == {"runs/run/log/" + "2".zfill(20)}
    assert usage.written_bytes < 4000
    packs = [key for key in before if key.startswith("packs/")]
    assert {key: backend.get(key) for key in packs} == {key: before[key] for key in packs}


def test_an_unchanged_state_sends_no_pack_at_all(backend, open_registry):
    calls = []
    run = open_registry(Metered(backend, calls)).create_run("run")
    run.save(small_state(), step=1)
    calls.clear()
    run.save(small_state(), step=2)
    assert [c for c in calls if c.key.startswith("packs/")] == []


def test_a_fresh_handle_stores_nothing_twice_either(run, backend, open_registry):
    run.save(small_state(), step=1)
    before = objects(backend)
    open_registry(backend).run("run").save(small_state(), step=2)
    assert objects(backend) == before


def test_one_tensor_of_500_changed_uploads_exactly_its_chunk(run, backend):
    state = many()
    run.save(state, step=1)
    before = objects(backend)
    state["model"]["w250"] = state["model"]["w250"] + 1
    run.save(state, step=2)
    (pack,) = packs(backend) - before
    assert chunks_of(backend, pack) == [state["model"]["w250"].tobytes()]


def test_one_row_changed_uploads_exactly_its_chunk(run, backend):
    with small_grid(256):
        state = {"m": {"w": np.arange(1600, dtype=np.int32).reshape(100, 16)}}
        run.save(state, step=1)
        before = objects(backend)
        state["m"]["w"] = state["m"]["w"].copy()
        state["m"]["w"][50] = -1
        run.save(state, step=2)
        (pack,) = packs(backend) - before
        assert chunks_of(backend, pack) == [state["m"]["w"][48:52].tobytes()]


def test_a_value_changed_back_is_found_again(run, backend):
    first, second = small_state(1), small_state(2)
    run.pins.tags.set("keep", run.save(first, step=1))
    run.save(second, step=2)
    before = packs(backend)
    run.save(first, step=3)
    assert packs(backend) == before


def test_equal_tensors_are_stored_once(run, backend):
    one = np.arange(1000)
    other = one[:50] + 7
    state = {"a": {"x": one, "y": one.copy()}, "b": {"z": one.copy(), "other": other}}
    checkpoint = run.save(state, step=1)
    assert sorted(stored_chunks(backend)) == sorted([one.tobytes(), other.tobytes()])
    assert checkpoint.size_bytes == 3 * one.nbytes + other.nbytes
    assert same(checkpoint.load(), state)


def test_equal_chunks_within_a_tensor_are_stored_once(run, backend):
    with small_grid(256):
        state = {"m": {"w": np.zeros((100, 64), np.float32)}}
        checkpoint = run.save(state, step=1)
        assert stored_chunks(backend) == [bytes(256)]
        assert same(checkpoint.load(), state)


def test_the_same_bytes_in_another_dtype_or_shape_are_not_stored_again(run, backend):
    one = np.arange(1000)
    run.save({"m": {"w": one}}, step=1)
    before = packs(backend)
    state = {"m": {"w": one.view(np.float64), "v": one.reshape(10, 100)}}
    assert same(run.save(state, step=2).load(), state)
    assert packs(backend) == before


# Packs


def test_components_never_share_a_pack(run, backend):
    checkpoint = run.save(small_state(), step=1)
    state = small_state()
    contents_of = sorted(b"".join(chunks_of(backend, key)) for key in packs_of(checkpoint))
    assert contents_of == sorted(
        [
            state["model"]["w"].tobytes() + state["model"]["b"].tobytes(),
            state["optimizer"]["m"].tobytes(),
        ]
    )


def test_tensors_bare_at_the_top_level_share_packs(run, backend):
    state = {f"layer{i}": np.arange(100) + i for i in range(20)}
    (pack,) = packs_of(run.save(state, step=1))
    assert len(chunks_of(backend, pack)) == 20


def test_the_digest_lists_of_components_share_no_pack_either(run, backend):
    with small_grid(64, list_threshold=4):
        rng = np.random.default_rng(0)
        state = {name: {"w": np.frombuffer(rng.bytes(640), np.uint8)} for name in "ab"}
        checkpoint = run.save(state, step=1)
        packs = [set(map(Digest.of, chunks_of(backend, key))) for key in packs_of(checkpoint)]
        assert [len(pack & checkpoint.manifest.chunk_lists.keys()) for pack in packs].count(2) == 0


def test_a_pack_holds_at_most_64_mebibytes():
    assert PACK_BYTES == 64 * MIB


@pytest.mark.parametrize("pack_bytes", [250, 256, 257, 1000])
def test_packs_are_filled_in_order_up_to_their_bound(backend, open_registry, pack_bytes):
    run = open_registry(backend).create_run("run")
    with small_grid(64, pack_bytes=pack_bytes):
        state = {"m": {"w": np.frombuffer(np.random.default_rng(1).bytes(64 * 41), np.uint8)}}
        checkpoint = run.save(state, step=1)
        sizes = [sum(map(len, chunks_of(backend, key))) for key in packs_of(checkpoint)]
        full = pack_bytes // 64 * 64
        whole, rest = divmod(64 * 41, full)
        assert sizes == [full] * whole + [rest] * bool(rest)
        assert same(checkpoint.load(), state)


def test_equal_components_of_two_runs_make_equal_packs_and_the_second_sends_none(
    backend, open_registry
):
    calls = []
    registry = open_registry(Metered(backend, calls))
    first = registry.create_run("a").save(small_state(), step=1)
    calls.clear()
    state = small_state() | {"more": {"w": np.arange(77) * 5}}
    second = registry.create_run("b").save(state, step=9)
    assert set(packs_of(first)) < set(packs_of(second))
    put = [c.key for c in calls if c.method == "put_if_absent" and c.key.startswith("packs/")]
    assert put == list(set(packs_of(second)) - set(packs_of(first)))


def test_packs_depend_on_the_state_alone():
    made = []
    for _ in range(2):
        backend = new_backend()
        with open_on(backend) as registry:
            registry.create_run("run").save(many(50), step=1)
        made.append({k: v for k, v in contents(backend).items() if k in objects(backend)})
    assert made[0] == made[1]


def test_a_state_without_bytes_has_no_pack(run, backend):
    state = {"a": {"x": 1}, "b": [], "c": {"e": np.empty((0, 3))}, "d": {"s": np.ones(8)}}
    checkpoint = run.save(state, step=1)
    assert packs_of(checkpoint) == []
    assert same(checkpoint.load(), state)
    assert {key.split("/")[0] for key in objects(backend)} == {"manifests", "placements"}


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65])
def test_at_most_64_bytes_lie_in_the_manifest(run, backend, nbytes):
    state = {"m": {"w": np.arange(nbytes, dtype=np.uint8)}}
    checkpoint = run.save(state, step=1)
    assert len(packs_of(checkpoint)) == (nbytes > 64)
    assert same(checkpoint.load(), state)


# Digest lists


def test_a_tensor_of_more_chunks_than_256_names_a_digest_list(run, open_registry, backend):
    assert LIST_THRESHOLD == 256
    with small_grid(64):
        rng = np.random.default_rng(2)
        exact = np.frombuffer(rng.bytes(64 * 256), np.uint8)
        above = np.frombuffer(rng.bytes(64 * 257), np.uint8)
        checkpoint = run.save({"m": {"exact": exact, "above": above}}, step=1)
        first, second = checkpoint.manifest.components["m"].tensors
        assert (len(first.chunks), first.chunk_list) == (256, None)
        assert (len(second.chunks), second.chunk_list is not None) == (0, True)
        (data,) = checkpoint.handle.reader.base().lists.values()
        assert len(data) == 257 * 32
        fresh = open_registry(backend).run("run").latest()
        assert same(fresh.load(), {"m": {"exact": exact, "above": above}})


def test_a_tensor_with_a_list_is_stored_by_its_changed_chunks(run, backend, open_registry):
    with small_grid(64, list_threshold=4):
        one = np.frombuffer(np.random.default_rng(3).bytes(640), np.uint8).copy()
        run.save({"m": {"w": one}}, step=1)
        before = objects(backend)
        one[320:324] = 0
        again = open_registry(backend).run("run")
        again.save({"m": {"w": one}}, step=2)
        new = packs(backend) - before
        assert sorted(len(c) for key in new for c in chunks_of(backend, key)) == [64, 320]
        assert same(open_registry(backend).run("run").latest().load(), {"m": {"w": one}})
        assert open_registry(backend).verify(deep=True).ok


@pytest.mark.soak
def test_a_tensor_beyond_a_gibibyte_is_listed_and_comes_back(tmp_path: Path, request):
    if "soak" not in request.config.option.markexpr:
        pytest.skip("run by hand with -m soak")
    with holdfast.init(tmp_path / "reg") as reg:
        one = np.arange(1100 * MIB // 8)
        reg.create_run("run").save({"m": {"w": one}}, step=1)
    with holdfast.open(tmp_path / "reg") as reg:
        checkpoint = reg.checkpoint("run")
        assert len(checkpoint.handle.reader.base().lists) == 1
        assert np.array_equal(checkpoint.load()["m"]["w"], one)
        assert reg.verify(deep=True).ok


# Bounds and failures


def test_bytes_in_flight_are_bounded(backend, open_registry, monkeypatch):
    opened, finished, most = set(), 0, 0
    lock = threading.Lock()
    buffer = ArrayLeaf.buffer

    def counted(leaf):
        nonlocal most
        with lock:
            opened.add(id(leaf))
            most = max(most, len(opened) - finished)
        return buffer(leaf)

    class Slow(Wrapper):
        def put_if_absent(self, key, body):
            nonlocal finished
            created = super().put_if_absent(key, body)
            if key.startswith("packs/"):
                threading.Event().wait(0.002)
                with lock:
                    finished += 1
            return created

    monkeypatch.setattr(ArrayLeaf, "buffer", counted)
    run = open_registry(Slow(backend)).create_run("run")
    with small_grid(4096, pack_bytes=1):
        run.save(many(200), step=1)
    assert finished == 200
    assert most < 40


def test_a_failed_save_shows_nothing_and_can_be_repeated(backend, open_registry):
    class Broken(Wrapper):
        broken = True

        def put_if_absent(self, key, body):
            if self.broken and key.startswith("packs/"):
                raise StoreUnavailable("down", where=key)
            return super().put_if_absent(key, body)

    broken = Broken(backend)
    run = open_registry(broken).create_run("run")
    before = contents(backend, "runs/")
    with pytest.raises(StoreUnavailable):
        run.save(small_state(), step=1)
    assert contents(backend, "runs/") == before
    broken.broken = False
    assert same(run.save(small_state(), step=1).load(), small_state())


class LateSecondPack(Wrapper):
    """Fails at the first pack, once the second one is under way; lets that go on only when told."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lock = threading.Lock()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.finished = threading.Event()
        self.packs = 0

    def put_if_absent(self, key, body):
        if not key.startswith("packs/"):
            return super().put_if_absent(key, body)
        with self.lock:
            self.packs += 1
            number = self.packs
        if number == 1:
            self.begun.wait(5)
            raise StoreUnavailable("down", where=key)
        self.begun.set()
        self.go_on.wait(0.3)
        try:
            return super().put_if_absent(key, body)
        finally:
            self.finished.set()


def test_a_failed_save_has_let_go_of_the_callers_memory(backend, open_registry):
    late = LateSecondPack(backend)
    run = open_registry(late).create_run("run")
    state = small_state()
    with pytest.raises(StoreUnavailable):
        run.save(state, step=1)
    # Training goes on in the same memory, while the put that was under way goes on as well.
    for part in (state["model"]["w"], state["model"]["b"], state["optimizer"]["m"]):
        part += 1
    late.go_on.set()
    late.finished.wait(5)
    run.save(small_state(), step=2)
    assert same(open_registry(backend).run("run").latest().load(), small_state())
