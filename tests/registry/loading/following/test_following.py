"""Following a run with a model: right bits in place, of which only what changed moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from holdfast import Storing
from holdfast.backends import Backend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered, ReadOnly
from holdfast.registry import pytree
from holdfast.registry.errors import (
    Damaged,
    IncompatibleState,
    InvalidInput,
    MissingObject,
    NotFound,
)
from holdfast.registry.face.run import Run
from holdfast.registry.history.actions import Rewind
from holdfast.registry.loading.following import watching
from holdfast.registry.loading.following.following import Following
from holdfast.registry.loading.following.swapping import Resident
from holdfast.registry.objects import NO_BASE
from holdfast.registry.spec import Retention, RunSpec
from tests.registry.loading.following.clock import Clock
from tests.support.faults import Hooked, Once, flip
from tests.support.loads import steps_of
from tests.support.stores import Open, contents, new_backend, packs_of, small_grid
from tests.support.strategies import examples

#: How states are stored so that a small change is a delta.
DELTAS = {"storing": Storing(compression="zstd", keyframe_every=8)}
CHUNK = 4000


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watching, "_sleep", clock.sleep)
    monkeypatch.setattr(watching, "_monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture(autouse=True)
def small_chunks():
    with small_grid(CHUNK):
        yield


class World:
    """A trainer, and a follower whose calls are counted."""

    def __init__(self, open_registry: Open, backend: Backend, run: Run) -> None:
        self.run = run
        self.backend = backend
        self.calls: list = []
        self._open = open_registry

    def follow(self, model: object, through: Backend | None = None, **how) -> Following:
        inner = ReadOnly(self.backend if through is None else through)
        reg = self._open(Metered(inner, self.calls))
        return reg.run(self.run.id).follow.into(model, **how)

    def ranges(self) -> list[tuple[str, int, int]]:
        """Return what was read of packs since, tables of contents left out; forget the calls."""
        found = [
            (call.key, call.byte_range.start, call.byte_range.stop)
            for call in self.calls
            if call.key.startswith("packs/") and call.byte_range is not None
        ]
        self.calls.clear()
        return found


@pytest.fixture
def world(open_registry: Open, backend: MemoryBackend, run: Run) -> World:
    return World(open_registry, backend, run)


def weights(seed: int = 0, count: int = 5000) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(count, np.float32))


def state(w: torch.Tensor, **more: torch.Tensor) -> dict:
    return {"model": {"w": w.clone(), **more}, "optimizer": {"m": w * 0.5, "lr": 0.1}}


def nudged(w: torch.Tensor, *at: int) -> torch.Tensor:
    """Change the lowest bit of some elements."""
    new = w.clone()
    new.view(torch.int32)[list(at)] ^= 1
    return new


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))


def rows_of(checkpoint, path: str) -> list:
    """Return the places of a tensor's chunks."""
    content = checkpoint.tensors()[path].content
    entry = next(one for one in checkpoint.manifest.tensors() if one.content == content)
    order = dict(
        zip(
            checkpoint.manifest.direct_chunks, checkpoint.handle.reader.placement.rows, strict=False
        )
    )
    return [order[digest] for digest in entry.chunks]


# In place


def test_a_module_is_filled_in_place(world: World) -> None:
    source, model = net(), net()
    pointers = [value.data_ptr() for value in model.state_dict().values()]
    following = world.follow(model, component="model", follow=False)
    for step in (1, 2):
        with torch.no_grad():
            source[0].weight.add_(1)
            source[1].running_mean.add_(1)
        source[1].num_batches_tracked.add_(1)
        world.run.save({"model": source, "optimizer": {"m": weights()}}, step=step)
        assert following.poll().step == step
        for name, value in source.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
    assert [value.data_ptr() for value in model.state_dict().values()] == pointers
    assert model[0].weight.requires_grad
    assert set(following.changed) == {
        "model/0.weight",
        "model/1.running_mean",
        "model/1.num_batches_tracked",
    }


def test_a_dict_of_arrays_without_a_component(world: World) -> None:
    model = {"m": {"w": np.zeros(3000), "n": np.zeros((), np.int64), "lr": 0.5}}
    memory = model["m"]["w"]
    world.run.save({"m": {"w": np.arange(3000.0), "n": np.array(7), "lr": 0.1}}, step=1)
    (checkpoint,) = world.follow(model, follow=False)
    assert checkpoint.ref == "run/main/step00000001"
    assert memory is model["m"]["w"]
    assert np.array_equal(memory, np.arange(3000.0))
    assert (model["m"]["n"], model["m"]["lr"]) == (7, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("strided", [False, True])
def test_any_dtype_and_memory(world: World, dtype: torch.dtype, strided: bool) -> None:
    one = (weights().reshape(50, 100) * 10).to(dtype)
    two = one.clone()
    two.view(torch.uint8)[7, 3] ^= 1
    target = torch.zeros(100, 50, dtype=dtype).T if strided else torch.zeros(50, 100, dtype=dtype)
    following = world.follow({"w": target}, component="m")
    for step, value in enumerate((one, two)):
        world.run.save({"m": {"w": value}}, step=step, **DELTAS)
        following.poll()
        assert torch.equal(target.contiguous().view(torch.uint8), value.view(torch.uint8))
    assert following.changed_bytes < one.nbytes or one.nbytes <= CHUNK


def test_a_delta_is_joined_with_the_model_where_it_lies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    read = Resident.read
    monkeypatch.setattr(
        Resident,
        "read",
        lambda self, number, into: copied.append(number) or read(self, number, into),
    )
    one, target = weights(), torch.zeros(5000)
    following = world.follow({"w": target}, component="model")
    for step, value in enumerate((one, nudged(one, 7, 4000))):
        world.run.save(state(value), step=step, **DELTAS)
        following.poll()
        assert torch.equal(target, value)
    bases = [row.base for row in rows_of(world.run.latest(), "model/w")]
    assert any(base != NO_BASE for base in bases)
    assert copied == []


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["torch", "strided", "numpy"])
def test_what_was_stored_with_less_precision_is_widened(
    world: World, policy: str, kind: str
) -> None:
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    target = torch.zeros(100, 50).T if kind == "strided" else torch.zeros(50, 100)
    model = {"w": target.numpy() if kind == "numpy" else target, "tiny": torch.zeros(3)}
    following = world.follow(model, component="m")
    w = weights().reshape(50, 100)
    for step in range(3):
        given = {"w": w, "tiny": torch.full((3,), step + 0.1)}
        how = {"storing": Storing(precision={"m/*": policy}, compression="zstd", keyframe_every=8)}
        world.run.save({"m": given}, step=step, **how)
        following.poll()
        assert torch.equal(target, w.to(narrow).float())
        assert torch.equal(model["tiny"], given["tiny"].to(narrow).float())
        w = w.clone()
        w[30, 7] *= 1.1
    assert following.changed_bytes == CHUNK + 6
    assert following.moved_bytes < 100  # a delta, against what the model's own numbers narrow to


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["torch", "strided", "numpy"])
def test_numbers_that_only_round_to_what_is_stored_are_replaced(
    world: World, policy: str, kind: str
) -> None:
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[policy]
    w = weights().reshape(50, 100)
    target = w.T.clone().T if kind == "strided" else w.clone()
    model = {"w": target.numpy() if kind == "numpy" else target}
    following = world.follow(model, component="m")
    how = {"storing": Storing(precision={"m/*": policy}, compression="zstd", keyframe_every=8)}
    world.run.save({"m": {"w": w}}, step=1, **how)
    following.poll()
    assert torch.equal(target, w.to(narrow).float())
    assert (following.changed, following.moved_bytes) == (("m/w",), 0)
    target.mul_(1 + 1e-4)
    world.run.save({"m": {"w": w}}, step=2, **how)
    following.poll()
    assert torch.equal(target, w.to(narrow).float())
    assert following.moved_bytes == 0  # what it rounds to is what is wanted


def test_numbers_that_round_to_infinity_are_replaced(world: World) -> None:
    model = {"w": np.full(3000, 1e30, np.float32)}
    world.run.save({"m": {"w": torch.ones(3000)}}, step=1, storing=Storing(precision="fp16"))
    world.follow(model, component="m").poll()
    assert (model["w"] == 1).all()


def test_not_numbers_are_held(world: World) -> None:
    w = weights()
    w.view(torch.int32)[:3] = torch.tensor([0x7FC10000, -0x3F0000, 0x7F800001])
    model = {"w": w.clone()}
    following = world.follow(model, component="m", rehash=True)
    how = {"storing": Storing(precision={"m/*": "bf16"}), "allow_nonfinite": True}
    for step in (1, 2):
        world.run.save({"m": {"w": w}}, step=step, **how)
        following.poll()
    assert following.changed == ()
    into = {"w": torch.zeros(5000)}
    world.run.latest().load_into(into, component="m")
    assert torch.equal(model["w"].view(torch.int32), into["w"].view(torch.int32))


@pytest.mark.parametrize("narrow", [False, True])
def test_where_memory_runs_out_the_model_is_as_it_was(
    world: World, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the pieces of memory that an exchange takes cannot be had."""
    w = weights()
    how = {"storing": Storing(precision={"m/b": "bf16"})} if narrow else {}
    world.run.save({"m": {"a": w, "b": w.clone(), "c": w * 2}}, step=1, **how)
    model = {"a": torch.zeros(5000), "b": torch.zeros(5000), "c": torch.zeros(5000, 2)[:, 1]}
    following = world.follow(model, component="m")
    following.fetch()
    allocate, left = pytree.allocate, 0

    def scarce(*args):
        nonlocal left
        if not left:
            raise MemoryError
        left -= 1
        return allocate(*args)

    monkeypatch.setattr(pytree, "allocate", scarce)
    for number in range(100):
        left = number
        try:
            if following.poll() is not None:
                break
        except MemoryError:
            assert not any(one.any() for one in model.values())
    assert number > 5
    assert torch.equal(model["a"], w)
    assert torch.equal(model["b"], w.bfloat16().float() if narrow else w)
    assert torch.equal(model["c"], w * 2)


def test_empty_scalar_and_tiny_tensors(world: World) -> None:
    def made(value: float) -> dict:
        return {"e": torch.zeros(0, 3), "s": torch.tensor(value), "t": torch.full((5,), value)}

    model = made(0)
    following = world.follow(model, component="m")
    for step in (1, 2):
        world.run.save({"m": made(step)}, step=step)
        following.poll()
        assert (model["s"].item(), model["t"].tolist()) == (step, [step] * 5)
        assert following.changed == ("m/s", "m/t")
    assert world.ranges() == []


def test_tensors_whose_chunks_stand_in_a_list(world: World) -> None:
    with small_grid(CHUNK, list_threshold=3):
        model = {"w": torch.zeros(5000)}
        following = world.follow(model, component="model")
        for step, w in enumerate((weights(), nudged(weights(), 4000))):
            world.run.save(state(w), step=step, **DELTAS)
            assert world.run.latest().manifest.chunk_lists
            following.poll()
            assert torch.equal(model["w"], w)
        assert following.changed_bytes == CHUNK


def test_tied_tensors_are_filled_once(world: World) -> None:
    shared = torch.zeros(5000)
    following = world.follow({"a": shared, "b": shared}, component="m")
    for step, w in enumerate((weights(), nudged(weights(), 0))):
        world.run.save({"m": {"a": w, "b": w}}, step=step)
        following.poll()
        assert torch.equal(shared, w)
    assert (following.changed, following.changed_bytes) == (("m/a",), CHUNK)


def test_tied_tensors_that_differ_are_refused(world: World) -> None:
    shared = torch.zeros(5000)
    world.run.save({"m": {"a": weights(), "b": nudged(weights(), 0)}}, step=1)
    with pytest.raises(IncompatibleState, match=r"m/a and m/b.*share memory and differ"):
        world.follow({"a": shared, "b": shared}, component="m").poll()
    assert not shared.any()


def test_tensors_that_share_part_of_their_memory_are_refused(world: World) -> None:
    shared = torch.zeros(6000)
    world.run.save({"m": {"a": weights(), "b": weights()}}, step=1)
    with pytest.raises(IncompatibleState, match=r"m/a and m/b.*share memory"):
        world.follow({"a": shared[:5000], "b": shared[1000:]}, component="m").poll()
    assert not shared.any()


def test_interleaved_tensors_are_not_taken_for_shared(world: World) -> None:
    memory = torch.zeros(5000, 2)
    world.run.save({"m": {"a": weights(1), "b": weights(2)}}, step=1)
    world.follow({"a": memory[:, 0], "b": memory[:, 1]}, component="m").poll()
    assert torch.equal(memory, torch.stack([weights(1), weights(2)], 1))


def test_a_parameter_that_was_replaced_is_filled(world: World) -> None:
    source, model = net(), net()
    following = world.follow(model, component="model")
    world.run.save({"model": source}, step=1)
    following.poll()
    model[0].weight = torch.nn.Parameter(torch.zeros(40, 30))
    world.run.save({"model": source}, step=2)
    following.poll()
    assert torch.equal(model[0].weight, source[0].weight)
    assert following.changed == ("model/0.weight",)


# What moves


def test_only_chunks_that_changed_move(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights()), step=1)
    following.poll()
    assert following.moved_bytes == following.changed_bytes == 20_000
    world.ranges()
    world.run.save(state(nudged(weights(), 2500)), step=2)
    following.poll()
    ((_, start, stop),) = world.ranges()
    assert stop - start == CHUNK
    assert (following.moved_bytes, following.changed_bytes) == (CHUNK, CHUNK)
    assert following.changed == ("model/w",)
    assert torch.equal(model["w"], nudged(weights(), 2500))


def test_nothing_moves_where_nothing_changed(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    for step in (1, 2):
        world.run.save(state(weights()), step=step)
        assert following.poll().step == step
    assert (following.changed, following.moved_bytes, following.changed_bytes) == ((), 0, 0)


def test_what_the_model_holds_at_first_does_not_move(world: World) -> None:
    w = nudged(weights(), 4999)
    world.run.save(state(weights()), step=1)
    following = world.follow({"w": w}, component="model")
    following.poll()
    assert following.moved_bytes == CHUNK
    assert torch.equal(w, weights())


def test_a_chunk_that_the_model_has_elsewhere_does_not_move(world: World) -> None:
    model = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
    following = world.follow(model, component="m")
    world.run.save({"m": {"a": weights(1), "b": weights(2)}}, step=1)
    following.poll()
    world.run.save({"m": {"a": weights(2), "b": weights(1)}}, step=2)
    following.poll()
    assert torch.equal(model["a"], weights(2))
    assert torch.equal(model["b"], weights(1))
    assert (following.moved_bytes, following.changed_bytes) == (0, 40_000)


def test_a_trusting_follower_hashes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    following = world.follow({"w": torch.zeros(5000)}, component="model", rehash=False)
    world.run.save(state(weights()), step=1)
    following.poll()

    monkeypatch.setattr(Resident, "examine", None)
    world.run.save(state(nudged(weights(), 9)), step=2)
    assert following.poll().step == 2


def test_the_base_of_a_delta_is_taken_out_of_the_model(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    first = world.run.save(state(weights()), step=1, **DELTAS)
    following.poll()
    world.ranges()
    second = world.run.save(state(nudged(weights(), 10, 2500)), step=2, **DELTAS)
    rows = [row for row in rows_of(second, "model/w") if row.base != 2**32 - 1]
    assert len(rows) == 2
    following.poll()
    assert torch.equal(model["w"], nudged(weights(), 10, 2500))
    assert following.moved_bytes == sum(row.stored_bytes for row in rows) < 300
    assert {key for key, *_ in world.ranges()}.isdisjoint(packs_of(first))


def test_a_chain_of_deltas_ends_at_what_the_model_holds(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    w = weights()
    saved = []
    for step in range(1, 6):
        saved.append(world.run.save(state(w), step=step, **DELTAS))
        if step == 2:
            following.poll()
            world.ranges()
        w = nudged(w, step)
    assert following.poll().step == 5
    assert torch.equal(model["w"], nudged(weights(), 1, 2, 3, 4))
    asked = {key for key, *_ in world.ranges()}
    assert len(asked) == 3  # a pack of each save since
    assert asked.isdisjoint(packs_of(saved[1]))


def test_other_components_are_not_read(world: World) -> None:
    world.run.save(state(weights()), step=1)
    following = world.follow({"w": torch.zeros(5000)}, component="model")
    following.poll()
    assert sum(stop - start for _, start, stop in world.ranges()) == 20_000


# A model that somebody else writes to


def test_what_was_changed_in_place_is_mended(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights()), step=1)
    following.poll()
    model["w"][4500] = 7  # in a chunk that will not change
    world.run.save(state(nudged(weights(), 0)), step=2)
    following.poll()
    assert torch.equal(model["w"], nudged(weights(), 0))
    assert following.changed_bytes == 2 * CHUNK


def unseen(w: torch.Tensor, at: int) -> None:
    """Write to a tensor in a way that torch does not count."""
    before = w._version
    w.numpy()[at] = 7
    assert w._version == before


def test_a_base_that_was_changed_unseen_is_read_from_the_store(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights()), step=1, **DELTAS)
    following.poll()
    unseen(model["w"], 5)
    unseen(model["w"], 4500)  # elsewhere: once misled, it looks at all of the model
    world.run.save(state(nudged(weights(), 0)), step=2, **DELTAS)
    following.poll()
    assert torch.equal(model["w"], nudged(weights(), 0))


def test_what_was_changed_unseen_and_goes_on_as_it_was(world: World) -> None:
    found = {}
    for at, rehash in enumerate((None, False, True)):
        model = {"w": torch.zeros(5000)}
        following = world.follow(model, component="model", rehash=rehash)
        world.run.save(state(weights()), step=2 * at)
        following.poll()
        unseen(model["w"], 4500)
        world.run.save(state(nudged(weights(), 0)), step=2 * at + 1)
        following.poll()
        found[rehash] = torch.equal(model["w"], nudged(weights(), 0))
    assert found == {None: True, False: False, True: True}


@pytest.mark.parametrize("moment", ["before fetch", "before swap"])
def test_what_is_written_past_the_counter_is_mended(world: World, moment: str) -> None:
    """In a tensor of which nothing changes, in one of which a part does, in one of few bytes."""
    model = {"w": torch.zeros(5000), "frozen": torch.zeros(5000), "tiny": torch.zeros(3)}
    following = world.follow(model, component="model")
    fixed = {"frozen": weights() * 2, "tiny": torch.ones(3)}
    for step in range(3):
        given = {"w": nudged(weights(), step), **fixed}
        world.run.save({"model": given}, step=step, **DELTAS)
        if moment == "before swap":
            following.fetch()
        if step:
            for name, at in (("w", 4500), ("frozen", 77), ("tiny", 1)):
                before = model[name]._version
                model[name].data[at] = 7
                assert model[name]._version == before
        if moment == "before fetch":
            following.fetch()
        assert following.swap() is not None
        assert all(torch.equal(model[name], value) for name, value in given.items())


def test_what_stays_is_hashed_and_what_changes_is_not_hashed_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    examine = Resident.examine
    monkeypatch.setattr(Resident, "examine", lambda *args: seen.append(args[1]) or examine(*args))
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights()), step=1, **DELTAS)
    following.poll()
    chunks = len(seen)
    seen.clear()
    world.run.save(state(nudged(weights(), 0)), step=2, **DELTAS)
    following.poll()
    assert sorted(seen) == list(range(1, chunks))


@pytest.mark.parametrize("kind", ["numpy", "inference"])
def test_where_nothing_is_counted_everything_is_looked_at(world: World, kind: str) -> None:
    found = {}
    for at, rehash in enumerate((None, False)):
        with torch.inference_mode():
            w = torch.zeros(5000)
        model = {"w": w.numpy() if kind == "numpy" else w}
        following = world.follow(model, component="model", rehash=rehash)
        world.run.save(state(weights()), step=2 * at)
        following.poll()
        w.numpy()[4500] = 7
        world.run.save(state(nudged(weights(), 0)), step=2 * at + 1)
        following.poll()
        found[rehash] = torch.equal(w, nudged(weights(), 0))
    assert found == {None: True, False: False}


# All or nothing


def test_damage_leaves_the_model_as_it_was(world: World) -> None:
    model = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
    following = world.follow(model, component="m")
    world.run.save({"m": {"a": weights(1), "b": weights(2)}}, step=1)
    following.poll()
    second = world.run.save({"m": {"a": weights(3), "b": weights(4)}}, step=2)
    row = rows_of(second, "m/b")[-1]
    flip(world.backend, str(second.handle.reader.placement.packs[row.pack].key), 8 * row.offset)
    for _ in range(2):
        with pytest.raises(Damaged):
            following.poll()
        assert torch.equal(model["a"], weights(1))
        assert torch.equal(model["b"], weights(2))
        assert following.current.step == 1
    world.run.save({"m": {"a": weights(5), "b": weights(6)}}, step=3)
    assert next(following).step == 3
    assert torch.equal(model["b"], weights(6))


def test_a_pack_that_is_lost_leaves_the_model_as_it_was(world: World) -> None:
    model = {"w": torch.ones(5000)}
    checkpoint = world.run.save(state(weights()), step=1)
    world.backend.delete(packs_of(checkpoint)[0])
    with pytest.raises(MissingObject):
        world.follow(model, component="model").poll()
    assert torch.equal(model["w"], torch.ones(5000))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.ones(4999), r"model/w is float32\[5000\], target float32\[4999\]"),
        (torch.ones(5000).double(), r"model/w is float32\[5000\], target float64\[5000\]"),
        (torch.ones(1).expand(5000), "model/w: .*cannot be written to"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(
    world: World, target: torch.Tensor, message: str
) -> None:
    world.run.save(state(weights()), step=1)
    with pytest.raises(IncompatibleState, match=message):
        world.follow({"w": target}, component="model").poll()
    assert world.ranges() == []
    assert target.eq(1).all()


def test_a_shape_that_changes_in_the_run_is_an_error(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights()), step=1)
    following.poll()
    world.run.save(state(weights(0, 6000)), step=2)
    with pytest.raises(IncompatibleState, match="step00000002"):
        following.poll()
    assert torch.equal(model["w"], weights())


def test_paths_of_one_side_only(world: World) -> None:
    world.run.save(state(weights(), old=torch.ones(70)), step=1)
    model = {"w": torch.zeros(5000), "new": torch.zeros(70)}
    with pytest.raises(IncompatibleState, match="model/new is not in the checkpoint"):
        world.follow(model, component="model").poll()
    world.follow(model, component="model", strict=False).poll()
    assert torch.equal(model["w"], weights())
    assert not model["new"].any()


def test_another_component_is_not_found(world: World) -> None:
    world.run.save(state(weights()), step=1)
    with pytest.raises(NotFound, match=r"modell.*no such component.*Did you mean 'model'"):
        world.follow({"w": torch.zeros(5000)}, component="modell").poll()


# Fetching beforehand


def test_what_was_fetched_is_put_in_without_asking_the_store(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights(1)), step=1)
    assert following.swap() is None
    assert following.fetch().step == 1
    assert not model["w"].any()
    assert following.current is None
    world.calls.clear()
    assert following.swap().step == 1
    assert world.calls == []
    assert torch.equal(model["w"], weights(1))
    assert (following.current.step, following.moved_bytes) == (1, 20_000)
    assert following.swap() is following.fetch() is None


def test_it_is_fetched_once(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save(state(weights(1)), step=1)
    following.fetch()
    world.ranges()
    assert following.fetch().step == following.poll().step == 1
    assert world.ranges() == []
    assert torch.equal(model["w"], weights(1))


def test_a_newer_one_takes_the_place_of_what_was_fetched(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    save(world, 1)
    following.fetch()
    save(world, 2)
    assert following.poll().step == 2
    assert torch.equal(model["w"], weights(2))


def test_what_was_fetched_is_let_go_with_the_run(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    save(world, 1)
    following.fetch()
    world.run.retention.drop("done with")
    assert following.fetch() is None
    assert following.swap() is None
    assert not model["w"].any()


@pytest.mark.parametrize("kind", ["counted", "numpy", "replaced"])
def test_a_model_that_was_written_to_since_gets_the_right_bits(world: World, kind: str) -> None:
    w = torch.zeros(5000)
    model = {"w": w.numpy() if kind == "numpy" else w}
    following = world.follow(model, component="model")
    save(world, 1)
    following.poll()
    world.run.save(state(nudged(weights(1), 0)), step=2)
    following.fetch()
    if kind == "replaced":
        model["w"] = torch.zeros(5000)
    elif kind == "counted":
        w[4000] = 7
    else:
        w.numpy()[4000] = 7
    assert following.swap().step == 2
    assert np.array_equal(model["w"], nudged(weights(1), 0))


# While others work


def test_what_is_collected_while_it_is_read_is_passed_over(world: World, reg) -> None:
    run = reg.create_run("short", retention=Retention(last=1))
    world.run = run
    hooked = Hooked(world.backend)
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, through=hooked, component="model")
    run.save(state(weights(1)), step=1)

    def overtake() -> None:
        run.save(state(weights(2)), step=2)
        reg.gc(grace_s=0)

    hooked.before = Once("packs/", overtake, "get")
    assert following.poll().step == 2
    assert hooked.before.done
    assert torch.equal(model["w"], weights(2))
    assert following.poll() is None


def test_what_is_repacked_while_it_is_read_is_found(world: World, reg) -> None:
    hooked = Hooked(world.backend)
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, through=hooked, component="model")
    world.run.save({"other": {"w": weights(3)}}, step=1)
    world.run.save(state(weights(1)), step=2)

    def move() -> None:
        assert reg.repack().packs_written
        reg.gc(grace_s=0)

    hooked.before = Once("packs/", move, "get")
    assert following.poll().step == 2
    assert hooked.before.done
    assert torch.equal(model["w"], weights(1))


def test_what_is_repacked_before_it_is_put_in_is_found(world: World, reg) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    world.run.save({"other": {"w": weights(3)}}, step=1)
    world.run.save(state(weights(1)), step=2)
    model["w"].copy_(weights(1))  # so nothing is fetched
    assert following.fetch().step == 2
    assert reg.repack().packs_written
    reg.gc(grace_s=0)
    model["w"].add_(1)
    assert following.swap().step == 2
    assert torch.equal(model["w"], weights(1))


def test_followers_write_nothing_and_know_nothing_of_each_other(world: World) -> None:
    models = [{"w": torch.zeros(5000)} for _ in range(2)]
    following = [world.follow(model, component="model") for model in models]
    world.run.save(state(weights()), step=1)
    before = contents(world.backend)
    assert [one.poll().step for one in following] == [1, 1]
    assert [one.poll() for one in following] == [None, None]
    assert contents(world.backend) == before
    assert all(torch.equal(model["w"], weights()) for model in models)


def test_a_look_that_finds_nothing_costs_one_request(world: World) -> None:
    following = world.follow({"w": torch.zeros(5000)}, component="model")
    world.run.save(state(weights()), step=1)
    following.poll()
    world.calls.clear()
    assert following.poll() is None
    assert [call.method for call in world.calls] == ["get"]


# What comes


def save(world: World, *which: int, **how) -> None:
    for step in which:
        world.run.save(state(weights(step)), step=step, **how)


def test_only_the_newest_comes(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    save(world, 1, 2, 3)
    following = world.follow(model, component="model", follow=False)
    assert repr(following) == "<Following run: nothing yet>"
    assert steps_of(following) == [3]
    assert torch.equal(model["w"], weights(3))
    assert repr(following) == "<Following run: run/main/step00000003>"


def test_every_one_comes_in_order_if_asked_for(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    save(world, 1, 2, 3)
    following = world.follow(model, component="model", follow=False, latest_only=False)
    for step in (1, 2, 3):
        assert next(following).step == step
        assert torch.equal(model["w"], weights(step))
    save(world, 4)
    assert list(following) == []


@pytest.mark.parametrize("component", [None, "optimizer"])
def test_what_a_thinned_one_lacks_comes_with_the_next(world: World, component: str | None) -> None:
    save(world, 1, 2, 3)
    world.run.retention.thin(world.run.checkpoints()[0], "model")
    optimizer = {"m": torch.zeros(5000)}
    model = optimizer if component else {"model": {"w": torch.zeros(5000)}, "optimizer": optimizer}
    following = world.follow(model, component=component, follow=False, latest_only=False)
    assert [one.step for one in following] == [2, 3]
    assert torch.equal(optimizer["m"], weights(3) * 0.5)
    following = world.follow({"w": torch.zeros(5000)}, component="model", latest_only=False)
    assert following.poll().step == 1  # which it has kept


def test_the_model_goes_back_with_the_training(world: World) -> None:
    model = {"w": torch.zeros(5000)}
    following = world.follow(model, component="model")
    save(world, 1, 2)
    assert following.poll().step == 2
    first = world.run.checkpoints()[0]
    world.run.handle.committer.commit(lambda state: [Rewind(to=first.handle.n)])
    assert following.poll().step == 1
    assert torch.equal(model["w"], weights(1))
    world.run.restore(first)
    save(world, 3)
    assert following.poll().step == 3


def test_only_of_a_phase_and_never_what_is_held_back(world: World, reg) -> None:
    world.run = reg.create_run("sick", preset=RunSpec(finite=("model/*",)))
    model = {"w": torch.zeros(5000)}
    save(world, 1, phase="1")
    save(world, 2, phase="2")
    world.run.save(state(weights() / 0), step=3, phase="2", allow_nonfinite=False)
    assert world.run.manifest.checkpoints[-1].held_back
    assert steps_of(world.follow(model, component="model", follow=False)) == [2]
    for latest_only in (True, False):
        how = {"component": "model", "follow": False, "latest_only": latest_only}
        assert steps_of(world.follow(model, phase=1, **how)) == [1]
        assert steps_of(world.follow(model, phase=2, **how)) == [2]


def test_it_waits_for_more_and_ends_with_the_run(world: World, clock: Clock) -> None:
    model = {"w": torch.zeros(5000)}
    acts = iter(
        [
            lambda: None,
            lambda: save(world, 1),
            lambda: save(world, 2, 3),
            lambda: setattr(world.run, "status", "completed"),
        ]
    )
    clock.then = lambda: next(acts)()
    seen = []
    for checkpoint in world.follow(model, component="model"):
        assert torch.equal(model["w"], weights(checkpoint.step))
        seen.append(checkpoint.step)
    assert seen == [1, 3]


def test_it_ends_with_the_last_checkpoint_of_a_run_that_is_over(world: World) -> None:
    save(world, 1)
    world.run.status = "completed"
    following = world.follow({"w": torch.zeros(5000)}, component="model")
    assert not following.is_over
    assert steps_of(following) == [1]
    assert following.is_over


def test_a_dropped_run_ends_it(world: World, clock: Clock, reg) -> None:
    save(world, 1)
    following = world.follow({"w": torch.zeros(5000)}, component="model")
    following.poll()
    world.run.retention.drop("done with")
    assert steps_of(following) == []
    assert following.is_over


def test_it_ends_when_nothing_comes_in_time(world: World, clock: Clock) -> None:
    save(world, 1)
    following = world.follow({"w": torch.zeros(5000)}, component="model", timeout_s=10)
    assert steps_of(following) == [1]
    assert sum(clock.slept) == pytest.approx(10)


@pytest.mark.parametrize("wrong", [{"poll_s": 0}, {"timeout_s": -1}, {"longest_poll_s": "x"}])
def test_what_is_no_time_is_refused(world: World, wrong: dict) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        world.follow({}, **wrong)


# Any history


@examples(
    40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_history_ends_in_the_right_bits(open_registry: Open, data: st.DataObject) -> None:
    """Saves, small and large changes, deltas or not, polls, and hands that meddle."""
    backend = new_backend()
    run = open_registry(backend).create_run("run", retention=Retention(last=2))
    shape = data.draw(st.sampled_from([(900,), (30, 40), (3, 7, 60)]))
    model = {"a": torch.zeros(shape), "b": torch.zeros(shape)}
    if data.draw(st.booleans()):
        model["b"] = torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))
    following = open_registry(ReadOnly(backend)).run("run").follow.into(model, component="m")
    truth = {
        name: weights(seed, int(np.prod(shape))).reshape(shape) for seed, name in enumerate("ab")
    }
    with small_grid(256):
        for step in range(data.draw(st.integers(1, 7))):
            name = data.draw(st.sampled_from("ab"))
            change = data.draw(st.sampled_from(["nothing", "little", "all", "swap"]))
            if change == "little":
                flat = truth[name].flatten()
                at = data.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=9))
                truth[name] = nudged(flat, *at).reshape(shape)
            elif change == "all":
                truth[name] = truth[name] * 1.5
            elif change == "swap":
                truth = {"a": truth["b"], "b": truth["a"]}
            run.save({"m": dict(truth)}, step=step, **data.draw(st.sampled_from([{}, DELTAS])))
            if data.draw(st.booleans()):
                model[name].mul_(data.draw(st.sampled_from([1, 2])))
            if data.draw(st.booleans()):
                following.poll()
                assert all(torch.equal(model[name], truth[name]) for name in truth)
        following.poll()
        assert all(torch.equal(model[name], truth[name]) for name in truth) or not step
