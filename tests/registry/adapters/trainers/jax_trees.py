"""Pytrees of jax that are saved, loaded and restored; for a child process."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast.errors import IncompatibleState, UnsupportedValue


class Moments(NamedTuple):
    mean: Any
    count: Any


class Nothing(NamedTuple):
    pass


@dataclasses.dataclass(frozen=True)
class Registered:
    layers: tuple[Any, ...]
    activation: Any
    name: str


jax.tree_util.register_dataclass(Registered, ["layers", "activation"], ["name"])


@dataclasses.dataclass
class Plain:
    weight: Any
    moments: Moments


@jax.tree_util.register_pytree_node_class
class ByIndex:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: tuple[Any, ...]) -> ByIndex:
        return cls(*parts)


def own(seed: int) -> dict[str, Any]:
    """Every kind of node and leaf that jax alone has."""
    wave = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) * seed
    return {
        "moments": Moments({"b": wave, "a": [wave, (wave + 1, None)]}, jnp.int32(seed)),
        "nothing": (Nothing(), Nothing()),
        "model": Registered((wave, jax.nn.relu), jax.nn.relu, "net"),
        "plain": Plain(wave, Moments(wave, seed)),
        "index": ByIndex(wave, {3: wave}),
        "partial": jax.tree_util.Partial(jnp.add, wave),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 2),
        "old_key": jax.random.PRNGKey(seed),
        "small": jnp.arange(-seed, 8 - seed).astype(jnp.int4),
        "half": wave.astype(jnp.bfloat16),
        "weak": jnp.asarray(seed + 0.5),
        "weak_moments": jnp.broadcast_to(jnp.asarray(seed), (2, 3)),
        "numpy": np.arange(3) * seed,
        "text": f"of {seed}",
        "flag": seed > 1,
    }


def libraries_optax(seed: int) -> dict[str, Any]:
    import optax

    schedule = optax.cosine_decay_schedule(0.1, 10)
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(schedule))
    params = {"w": jnp.full((3, 2), seed, jnp.float32), "b": jnp.zeros(2)}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    return {"params": optax.apply_updates(params, updates), "opt": state}


def libraries_equinox(seed: int) -> dict[str, Any]:
    import equinox

    model = equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed))
    return {"model": model, "arrays": equinox.filter(model, equinox.is_array)}


def libraries_flax(seed: int) -> dict[str, Any]:
    import optax
    from flax import nnx
    from flax.training.train_state import TrainState

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    params = {"w": jnp.full((3, 2), seed, jnp.float32)}
    trained = TrainState.create(apply_fn=jnp.sin, params=params, tx=_SGD(optax))
    return {"trained": trained, "nnx": nnx.state(Net(nnx.Rngs(seed)))}


def _SGD(optax: Any) -> Any:  # noqa: N802 - one transformation for both seeds: it is static
    return _MADE.setdefault("sgd", optax.sgd(0.1, momentum=0.9))


_MADE: dict[str, Any] = {}


def comes_back(url: str, kind: str) -> None:
    """A new tree of another seed gets the data of the saved one, and keeps its structure."""
    make: Callable[[int], dict[str, Any]] = globals()[kind]
    saved = make(3)
    run = holdfast.open(url).run(kind, create=True)
    run.save(holdfast.jax.pack(saved), step=1)
    stored = run.latest().load()
    restored = holdfast.jax.restore(make(1), stored)
    _check_same(restored, saved)
    if kind != "own":  # dataclasses that are not registered are no pytrees of jax
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
    again = holdfast.jax.pack(restored)
    first = run.latest().digest
    assert run.save(again, step=2).digest == first


def _check_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    pairs, expected = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (one, other))
    assert [path for path, _ in pairs] == [path for path, _ in expected]
    for (path, found), (_, wanted) in zip(pairs, expected, strict=True):
        assert type(found) is type(wanted), path
        if not hasattr(wanted, "dtype"):
            if dataclasses.is_dataclass(wanted):
                _check_same(vars(found), vars(wanted))
            else:
                assert found is wanted or found == wanted, path
            continue
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        if isinstance(wanted, jax.Array):
            assert found.committed == wanted.committed
            assert getattr(found, "weak_type", None) == getattr(wanted, "weak_type", None)
            if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
                found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), path


def places_like_the_target() -> None:
    """Shardings, abstract targets, and counters that a jitted step made arrays of."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    stored = {"w": np.arange(8.0, dtype=np.float32), "step": np.int32(3), "rate": 0.5}
    target = {"w": jax.device_put(jnp.zeros(8), split), "step": 0, "rate": jnp.float32(0)}
    made = holdfast.jax.restore(target, stored | {"step": np.asarray(3, np.int32)})
    assert made["w"].sharding == split
    assert (type(made["step"]), made["step"]) == (int, 3)
    assert (made["rate"].dtype, float(made["rate"])) == (jnp.float32, 0.5)
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros(8), "key": jax.random.key(0)})
    packed = holdfast.jax.pack({"w": jnp.ones(8), "key": jax.random.key(5)})
    made = holdfast.jax.restore(shapes, packed)
    assert isinstance(made["w"], jax.Array)
    assert (jax.random.key_data(made["key"]) == packed["key"]["data"]).all()


_ZEROS = np.zeros((2, 3), np.float32)
_WRONG: list[tuple[Any, Any, str]] = [
    (
        {"a": Moments(jnp.zeros(3), 1)},
        {"a": {"mean": _ZEROS, "count": 1}},
        r"^a/mean: .*float32\[3\]; found float32\[2, 3\]",
    ),
    (
        {"a": jnp.zeros((2, 3), jnp.bfloat16)},
        {"a": _ZEROS},
        r"^a: .*bfloat16\[2, 3\]; found float32\[2, 3\]",
    ),
    ({"a": Moments(1, 2)}, {"a": {"mean": 1}}, "^a/count: the stored state has no such part"),
    ({"a": Nothing()}, {"a": {"mean": _ZEROS}}, r"^a/mean: the target has no such part; .*float32"),
    ({"a": [1, 2]}, {"a": [1]}, "^a/1: the stored state has no such part"),
    ({"a": (1,)}, {"a": [1]}, "^a: .*a tuple; found a list"),
    ({"a": 1}, {"a": 1.5}, "^a: .*a int; found a float"),
    ({"a": None}, {"a": _ZEROS}, r"^a: .*None; found float32"),
    ({"a": jnp.int4(1)}, {"a": np.asarray(100, np.int8)}, r"^a: .*int4\[\]; found int8\[\]"),
    ({"a": jax.random.key(0)}, {"a": _ZEROS}, r"^a: not a key.*key<fry>\[\]; found float32"),
    ({"a": jax.random.key(0)}, {"a": {"prng_key": "os.system", "data": _ZEROS}}, "^a: not a key"),
    (
        {"a": jax.random.key(0)},
        holdfast.jax.pack({"a": jax.random.key(0, impl="rbg")}),
        r"^a: a key.*fry.*rbg",
    ),
    ({"a": jnp.int4(1)}, {"a": 100}, r"^a: .*int4\[\]; found int64\[\]"),
    ({"a": jnp.int4(1)}, {"a": 0.5}, r"^a: .*int4\[\]; found a float"),
    ({"a": jnp.int32(1)}, {"a": 2**70}, r"^a: .*int32\[\]"),
    ({"a": 1}, {"a": np.float32([1.0])[0:1].reshape(())}, r"^a: .*a int; found float32\[\]"),
    ({"a": jax.random.key(0)}, {"a": {"prng_key": ["x"], "data": 5}}, "^a: not a key"),
    ({"a": jax.random.key(0)}, {"a": {"prng_key": 5, "data": [1, 2]}}, "^a: not a key"),
    (
        {"a": jax.random.key(0)},
        {"a": {"prng_key": "rbg", "data": np.zeros(2, np.uint32)}},
        "^a: not a key",
    ),
    (Moments(1, 2), [1, 2], "^the stored state: .*a Moments; found a list"),
]


def refuses() -> None:
    """Refusals name the path, the expected and the found part, and the public call."""
    for target, stored, text in _WRONG:
        with pytest.raises(IncompatibleState, match=text):
            holdfast.jax.restore(target, stored)
    with jax.enable_x64(True):
        wide = {"n": jnp.arange(3) + 2**40}
    with pytest.raises(
        IncompatibleState, match=r"n: .*jax_enable_x64.*expected int64; found int32"
    ):
        holdfast.jax.restore(wide, {"n": np.asarray(wide["n"])})  # as it comes out of a registry
    run = holdfast.init("memory://trees").run("r", create=True)
    for value in (Moments(1, 2), ByIndex(1), jax.random.key(0), jnp.int4(1)):
        with pytest.raises(UnsupportedValue, match=r"^state\['x'\]\[0\]: .*holdfast\.jax\.pack"):
            run.save({"x": [value]}, step=1)
    with pytest.raises(UnsupportedValue, match=r"\(holdfast\.register_adapter\)"):
        run.save({"x": Plain(1, 2)}, step=1)


def readers_own(strike: int | None) -> dict[str, Any]:
    """Return the names that the page about jax leaves to its reader."""
    done = 0

    def train_step(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        nonlocal done
        if done == strike:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        key, drawn = jax.random.split(state["key"])
        batch = jax.random.normal(drawn, (4, 3))
        grads = jax.grad(lambda params: ((batch @ params["w"] + params["b"]) ** 2).mean())
        updates, opt = optimizer.update(grads(state["params"]), state["opt"], state["params"])
        params = jax.tree.map(jnp.add, state["params"], updates)
        return {"params": params, "opt": opt, "key": key}

    return {"params": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, "train_step": train_step}
