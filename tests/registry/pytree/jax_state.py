"""Checks of jax arrays, in a process of its own: jax reads its flags when it is imported."""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast.registry.errors import IncompatibleState, UnsupportedValue
from holdfast.registry.pytree import jax_arrays

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64")


def numpy_state() -> dict[str, object]:
    """Arrays that are cut into chunks, and those that are too small for it."""
    dice = np.random.default_rng(1)
    tables = {
        name: dice.normal(size=(64, 48)).astype(getattr(ml_dtypes, name, name)) for name in DTYPES
    }
    large = dice.normal(size=(1024, 2048)).astype(np.float32)
    parts = {"large": large, "step": np.int32(3), **tables}
    # jax sorts the keys of dicts.
    return {"params": dict(sorted(parts.items())), "scale": np.float32([2.0])}


def placed(state: dict[str, object]) -> dict[str, object]:
    """The same as jax arrays: split on one axis with copies, on two axes, and in copies alone."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    specs = {"large": ("a",), "bfloat16": (("a", "b"),), "float32": ("b", "a")}

    def place(path: tuple[object, ...], value: object) -> object:
        spec = specs.get(getattr(path[-1], "key", ""), ())
        if not isinstance(value, np.ndarray):
            return value
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(place, state)


def check_one_process() -> None:
    """Ids, the number of parts that are read, loading, and refusals."""
    plain = numpy_state()
    sharded = placed(plain)
    read: list[tuple[int, ...]] = []
    on_host = jax_arrays.on_host

    def counted(part: object) -> object:
        made = on_host(part)
        if made.nbytes > 1_000_000:
            read.append(made.shape)
        return made

    jax_arrays.on_host = counted
    with holdfast.init("memory://jax", skip_race_probe=True) as reg:
        wanted = reg.run("numpy", create=True).save(plain, step=1)
        run = reg.run("jax", create=True)
        found = run.save(sharded, step=1)
        assert found.digest == wanted.digest
        assert read == [(256, 2048)] * 4, "each part once, no copy"
        assert run.save_async(sharded, step=2).wait().digest == wanted.digest
        loaded = found.load()["params"]
        assert all(type(loaded[name]) is np.ndarray for name in DTYPES)
        assert loaded["bfloat16"].dtype == ml_dtypes.bfloat16
        large = sharded["params"]["large"]
        again = jax.make_array_from_callback(
            large.shape, large.sharding, lambda index: found["params/large"][index]
        )
        assert again.sharding == large.sharding
        assert bool((again == large).all())
        with pytest.raises(IncompatibleState, match=r"jax cannot be filled.*make_array_from"):
            found.load_into(sharded)
        donated = jax.device_put(np.ones(3))
        donated.delete()
        for value, text in [
            (jax.random.key(0), "key_data"),
            (jax.numpy.ones(3, jax.numpy.int4), "int4"),
            (donated, "donated"),
        ]:
            with pytest.raises(UnsupportedValue, match=text):
                run.save({"x": {"y": value}}, step=3)
        with pytest.raises(UnsupportedValue, match=r"outside of jax\.jit"):
            jax.jit(lambda x: run.save({"x": x}, step=3))(np.ones(3))
        assert len(run.checkpoints()) == 2


def check_two_processes(rank: int, port: str) -> None:
    """An array that is spread over processes is refused by its path; one that is not is stored."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("a",))
    spread = jax.make_array_from_callback(
        (8,), NamedSharding(mesh, PartitionSpec("a")), lambda index: np.arange(8.0)[index]
    )
    with holdfast.init(f"memory://{rank}", skip_race_probe=True) as reg:
        run = reg.run("run", create=True)
        with pytest.raises(UnsupportedValue, match=r"state\['p'\]\['w'\].*process_allgather"):
            run.save({"p": {"w": spread}}, step=1)
        run.save({"p": {"w": spread.addressable_shards[0].data}}, step=1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check_two_processes(int(sys.argv[1]), sys.argv[2])
    else:
        check_one_process()
