"""What each operation asks of the store, request by request.

A number here is a promise to whoever pays for requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from holdfast import sync
from holdfast.backends.wrappers import Call, Metered
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.objects.chunking import CHUNK_BYTES
from holdfast.registry.writing import packing
from tests.support.states import make_state
from tests.support.stores import Scratch, kind_of, new_backend, opened

# A pack is looked for under any generation before it is put, unless a base has its component.
_CHANGED = ["put_if_absent packs"]
_PACK = ["list packs", *_CHANGED]
_FILES = ["put_if_absent manifests", "put_if_absent placements"]
# Is the newest slot still the one that was read? Asked beside the packs.
_COMMIT = ["get log", "put_if_absent log"]
_TAIL = [*_FILES, *_COMMIT]


class Watched:
    """A registry that tells what it asks for."""

    def __init__(self, store: Scratch) -> None:
        self.calls: list[Call] = []
        self.backend = Metered(store, self.calls)
        self.registry: Registry = open_on(self.backend)
        self.calls.clear()

    def asked(self) -> Counter[str]:
        """Return what was asked since the last time: methods, each with the kind of key."""
        told = Counter(f"{call.method} {kind_of(call.key)}" for call in self.calls)
        self.calls.clear()
        return told


@pytest.fixture
def store() -> Scratch:
    """A registry with a run that two steps were saved in."""
    backend = new_backend()
    with opened(backend) as registry:
        run = registry.create_run("night", seed=1)
        for step in (1, 2):
            run.save(make_state(step), step=step)
    return backend


@pytest.fixture
def watched(store: Scratch) -> Iterator[Watched]:
    """The same, opened anew."""
    found = Watched(store)
    with found.registry:
        yield found


@pytest.fixture
def trained(watched: Watched) -> Run:
    """A trainer's handle that has saved step 3."""
    run = watched.registry.run("night")
    run.restore()
    run.save(make_state(3), step=3)
    watched.asked()
    return run


def test_create_run_looks_at_the_registry_and_puts_a_slot() -> None:
    watched = Watched(new_backend())
    with watched.registry:
        watched.registry.create_run("night", seed=1)
        assert watched.asked() == Counter(["list epochs", "get registry.json", "put_if_absent log"])


def test_first_save_looks_for_sweeps_once_and_puts_a_pack_a_component() -> None:
    watched = Watched(new_backend())
    with watched.registry:
        run = watched.registry.create_run("night", seed=1)
        watched.asked()
        run.save(make_state(1), step=1)
        assert watched.asked() == Counter(["list epochs", *_PACK, *_PACK, *_TAIL])


def test_later_save_asks_for_nothing_but_what_it_puts(watched: Watched, trained: Run) -> None:
    trained.save(make_state(4), step=4)
    assert watched.asked() == Counter([*_CHANGED, *_CHANGED, *_TAIL])
    trained.save({**make_state(5), "added": make_state(6)["model"]}, step=5)
    assert watched.asked() == Counter([*_CHANGED, *_CHANGED, *_PACK, *_TAIL])


def test_save_that_changes_one_component_puts_one_pack(watched: Watched, trained: Run) -> None:
    changed = {**make_state(3), "optimizer": make_state(9)["optimizer"]}
    trained.save(changed, step=4)
    assert watched.asked() == Counter([*_CHANGED, *_TAIL])


def test_save_of_an_unchanged_state_only_commits(watched: Watched, trained: Run) -> None:
    trained.save(make_state(3), step=4)
    assert watched.asked() == Counter(_COMMIT)


def test_save_that_is_there_already_looks_at_the_head(watched: Watched, trained: Run) -> None:
    trained.save(make_state(3), step=3)
    # Is anything new, and is the newest slot still the one that was read?
    assert watched.asked() == Counter({"get log": 2})


def test_latest_is_one_request_and_report_and_tag_only_commit(
    watched: Watched, trained: Run
) -> None:
    checkpoint = trained.latest()
    assert checkpoint is not None
    assert watched.asked() == Counter({"get log": 1})  # is anything new?
    checkpoint.report({"loss": 0.5})
    assert watched.asked() == Counter(_COMMIT)
    trained.pins.tags.set("keeper", checkpoint)
    assert watched.asked() == Counter(_COMMIT)


def test_going_on_with_a_run_costs_what_opening_it_does(watched: Watched) -> None:
    watched.registry.run("night")
    opening = watched.asked()
    watched.registry.run("night", create=True)
    assert watched.asked() == opening


def test_open_reads_the_configuration_and_a_run_its_slots(store: Scratch) -> None:
    backend = Metered(store, calls := [])
    with open_on(backend) as registry:
        assert [call.method for call in calls] == ["get"]
        calls.clear()
        registry.run("night")
        asked = Counter(f"{call.method} {kind_of(call.key)}" for call in calls)
        assert asked == Counter({"list snapshots": 1, "list log": 1, "get log": 3})


def test_restore_reads_what_it_needs_once(watched: Watched) -> None:
    run = watched.registry.run("night")
    watched.asked()
    run.restore()
    # The slot is the one that is not there yet. The embedding of step 1 lies in a pack of its own.
    assert watched.asked() == Counter(
        {"get log": 1, "get manifests": 1, "get placements": 1, "get packs": 3}
    )


def test_second_load_reads_only_chunks(watched: Watched) -> None:
    checkpoint = watched.registry.checkpoint("night/latest")
    checkpoint.load()
    watched.asked()
    checkpoint.load()
    assert watched.asked() == Counter({"get packs": 3})


def test_sync_of_nothing_new_writes_nothing(store: Scratch) -> None:
    destination = new_backend()
    with opened(store) as source:
        with opened(destination) as registry:
            sync(source, registry)
        watched = Watched(destination)
        with watched.registry, watched.backend.measure() as usage:
            sync(source, watched.registry)
        assert usage.written_bytes == 0
        assert watched.asked() == Counter(
            {"list snapshots": 1, "list log": 1, "get log": 3, "list epochs": 1}
        )


def test_one_tensor_of_500_costs_its_own_bytes() -> None:
    rng = np.random.default_rng(0)
    model = {f"layer{n:03d}": rng.standard_normal((64, 32)).astype(np.float32) for n in range(500)}
    backend = new_backend()
    metered = Metered(backend)
    with open_on(metered) as registry:
        run = registry.create_run("night", seed=1)
        run.save({"model": model}, step=1)
        model["layer250"] = model["layer250"] + 1
        with metered.measure() as usage:
            checkpoint = run.save({"model": model}, step=2)
        beside = sum(
            backend.stat(key).size_bytes
            for key in _keys_of_newest(registry, checkpoint.digest.hex())
        )
        # A pack adds its table, of one chunk, to the chunk.
        assert usage.written_bytes <= model["layer250"].nbytes + 256 + beside
        assert model["layer250"].nbytes < CHUNK_BYTES
        assert usage.requests == len([*_CHANGED, *_TAIL])


@pytest.mark.parametrize("before", [[], [1, 2]], ids=["first save", "later save"])
def test_content_that_an_older_generation_holds_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, before: list[int]
) -> None:
    """Runs push the same bases, and a sweep passes between each two of them."""
    monkeypatch.setattr(packing, "PACK_BYTES", 2**20)
    monkeypatch.setattr(packing, "_LOOKED_FOR_BYTES", 2**18)
    pushed = [
        {"base": {f"w{n}": np.random.default_rng([seed, n]).bytes(300_000) for n in range(6)}}
        for seed in (*before, 3)
    ]
    metered = Metered(new_backend())
    sent = []
    with open_on(metered) as registry:
        for number in range(4):
            run = registry.create_run(f"pusher{number}", seed=1)
            with metered.measure() as usage:
                for step, state in enumerate(pushed):
                    run.save(state, step=step)
            sent.append(usage.written_bytes)
            waste = registry.create_run(f"waste{number}", seed=1)
            waste.save(make_state(100 + number), step=1)
            waste.retention.drop(reason="a sweep needs something to condemn", now=True)
            assert registry.gc(grace_s=0).epoch == number + 1
    assert sent[0] > 10 * max(sent[1:])


def _keys_of_newest(registry: Registry, digest: str) -> list[str]:
    """Return the keys of a manifest, its placement and the slot that names them."""
    state = registry.run("night").manifest
    place = state.places[-1]
    assert place.manifest.hex() == digest
    found = [
        info.key
        for kind, wanted in (("manifests", place.manifest), ("placements", place.placement))
        for info in registry.handle.store.backend.list(f"{kind}/{wanted.hex()[:2]}/{wanted.hex()}")
    ]
    slots = list(registry.handle.store.backend.list("runs/night/log/"))
    return [*found, slots[-1].key]
