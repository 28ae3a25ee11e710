"""Where the tensors of a target lie: what shares memory, or cannot be written to, is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Storing
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, NotFound
from holdfast.registry.face.run import Run
from holdfast.registry.loading.destinations import Extent, check_writable, overlaps

ROWS, COLUMNS = 300, 300


def extent(source: Any) -> Extent:
    return Extent.of(source, *pytree.describe(source))


def addresses(source: np.ndarray) -> list[int]:
    """Return the address of every byte of every element."""
    steps = [range(length) for length in source.shape]
    return [
        source.ctypes.data
        + sum(at * step for at, step in zip(index, source.strides, strict=True))
        + k
        for index in itertools.product(*steps)
        for k in range(source.itemsize)
    ]


@pytest.mark.parametrize(
    "source",
    [
        np.broadcast_to(np.zeros(4), (3, 4)),
        torch.zeros(4).expand(3, 4),
        np.frombuffer(b"abcd", "u1"),
        torch.zeros(12).as_strided((5, 5), (1, 1)),
        np.lib.stride_tricks.as_strided(np.zeros(12), (5, 5), (8, 8)),
    ],
)
def test_what_cannot_be_written_to_is_refused(source: Any) -> None:
    with pytest.raises(IncompatibleState, match=r"m/w: .*cannot be written to"):
        check_writable("m/w", source, extent(source))


@pytest.mark.parametrize(
    "source",
    [
        torch.zeros(3, 4, 5).permute(2, 0, 1),
        torch.zeros(8, 6)[::2, 1::2],
        np.zeros((4, 6))[::-1, ::-2],
        torch.zeros(1, 4).expand(1, 4),
        torch.zeros(0, 4),
        torch.zeros(()),
    ],
)
def test_what_is_apart_in_itself_can_be_written_to(source: Any) -> None:
    check_writable("m/w", source, extent(source))


views = st.tuples(
    st.integers(0, 8), st.integers(0, 8), st.integers(1, 3), st.integers(1, 3), st.booleans()
)


@given(views, views)
def test_two_views_overlap_where_they_have_a_byte_in_common(one: tuple, other: tuple) -> None:
    memory = np.zeros((12, 12), np.int16)

    def view(top: int, left: int, down: int, right: int, flipped: bool) -> np.ndarray:
        made = memory[top::down, left::right][:3, :3]
        return made.T[::-1] if flipped else made

    first, second = view(*one), view(*other)
    shared = set(addresses(first)) & set(addresses(second))
    found = list(overlaps({"a": extent(first), "b": extent(second)}))
    assert bool(found) == bool(shared)
    assert len(set(addresses(first))) == first.nbytes
    assert extent(first).is_apart_in_itself
    low, high = extent(first).bounds
    assert (low, high) == (min(addresses(first)), max(addresses(first)) + 1)


Fill = Callable[[Run, object], object]


def load(run: Run, target: object) -> object:
    return run.latest().load_into(target, component="m")


def follow(run: Run, target: object) -> object:
    return list(run.follow.into(target, component="m", follow=False))


@pytest.fixture(params=[load, follow])
def fill(request: pytest.FixtureRequest) -> Fill:
    return request.param


@pytest.fixture
def saved(run: Run) -> tuple[Run, dict[str, torch.Tensor]]:
    """Return a run with two tensors that differ."""
    whole = torch.arange(2.0 * ROWS * COLUMNS).reshape(2, ROWS, COLUMNS)
    state = {"a": whole[0].clone(), "b": whole[1].clone()}
    run.save({"m": state}, step=1)
    return run, state


def columns(at: int, *, numpy: bool = False) -> dict[str, Any]:
    """Return the first columns of a weight, and those from `at` on."""
    fused: Any = np.zeros((ROWS, at + COLUMNS), np.float32) if numpy else None
    fused = torch.zeros(ROWS, at + COLUMNS) if fused is None else fused
    return {"a": fused[:, :COLUMNS], "b": fused[:, at:]}


def rows(at: int) -> dict[str, Any]:
    """Return the first rows of a weight, and those from `at` on: both are contiguous."""
    fused = torch.zeros(at + ROWS, COLUMNS)
    return {"a": fused[:ROWS], "b": fused[at:]}


@pytest.mark.parametrize(
    "target", [columns(COLUMNS - 100), columns(COLUMNS - 100, numpy=True), rows(ROWS - 1)]
)
def test_views_of_a_fused_weight_that_overlap_are_refused(
    saved: tuple, fill: Fill, target: dict[str, Any]
) -> None:
    with pytest.raises(IncompatibleState, match=r"m/a and m/b: .*share memory"):
        fill(saved[0], target)
    assert not target["a"].any()
    assert not target["b"].any()


@pytest.mark.parametrize("make", [columns, partial(columns, numpy=True), rows])
def test_views_of_a_fused_weight_that_are_disjoint_are_filled(
    saved: tuple, fill: Fill, make: Callable[[int], dict[str, Any]]
) -> None:
    run, state = saved
    target = make(COLUMNS)
    fill(run, target)
    assert all(torch.equal(torch.as_tensor(target[name]), state[name]) for name in state)


def test_views_that_alternate_are_filled(saved: tuple, fill: Fill) -> None:
    run, state = saved
    heads = torch.zeros(ROWS, COLUMNS, 2)
    target = {"a": heads[..., 0], "b": heads[..., 1]}
    fill(run, target)
    assert all(torch.equal(target[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(700).as_strided((ROWS, COLUMNS), (1, 1)),
        lambda: torch.zeros(1, COLUMNS).expand(ROWS, COLUMNS),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(700, "f4"), (ROWS, COLUMNS), (4, 4)),
        lambda: np.frombuffer(bytes(4 * ROWS * COLUMNS), "f4").reshape(ROWS, COLUMNS),
    ],
)
def test_a_target_that_cannot_be_written_to_is_refused_first(
    saved: tuple, fill: Fill, make: Callable[[], Any]
) -> None:
    target = {"a": torch.zeros(ROWS, COLUMNS), "b": make()}
    with pytest.raises(IncompatibleState, match=r"m/b: .*cannot be written to"):
        fill(saved[0], target)
    assert not target["a"].any()
    assert not target["b"].any()


def test_one_strided_tensor_at_two_paths_that_differ_is_refused(saved: tuple, fill: Fill) -> None:
    one = torch.zeros(COLUMNS, ROWS).T
    with pytest.raises(IncompatibleState, match=r"m/a and m/b: .*differ in the checkpoint"):
        fill(saved[0], {"a": one, "b": one})
    assert not one.any()


def test_one_memory_at_two_paths_that_are_equal_is_filled(run: Run, fill: Fill) -> None:
    weight = torch.arange(1.0 * ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    run.save({"m": {name: weight.clone() for name in "abc"}}, step=1)
    one = torch.zeros(COLUMNS, ROWS).T
    fill(run, {"a": one, "b": one.numpy(), "c": one.view(ROWS, COLUMNS)})
    assert torch.equal(one, weight)


# What is said


@pytest.mark.parametrize("component", [3, ["m"], b"m"])
def test_a_component_that_is_not_a_name_is_refused(saved: tuple, component: Any) -> None:
    run, _ = saved
    with pytest.raises(InvalidInput, match="not the name of a component"):
        run.latest().load_into({"a": torch.zeros(3)}, component=component)
    with pytest.raises(InvalidInput, match="not the name of a component"):
        run.follow.into({"a": torch.zeros(3)}, component=component)


def test_an_empty_name_is_not_all_components(saved: tuple) -> None:
    with pytest.raises(NotFound, match="no such component"):
        saved[0].latest().load_into({"a": torch.zeros(ROWS, COLUMNS)}, component="")


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_the_checkpoint_has_nothing_for_is_not_followed(
    saved: tuple, strict: bool
) -> None:
    run, _ = saved
    compiled = {"_orig_mod.a": torch.zeros(ROWS, COLUMNS)}
    with pytest.raises(IncompatibleState, match=r"pass the module inside, `model\._orig_mod`"):
        list(run.follow.into(compiled, component="m", strict=strict, follow=False))
    other = {"c": torch.zeros(ROWS, COLUMNS)}
    with pytest.raises(IncompatibleState, match="Name the right component"):
        list(run.follow.into(other, component="m", strict=strict, follow=False))
    assert run.latest().load_into(compiled, component="m", strict=False).loaded == ()


def test_the_hint_fits_what_is_wrong(run: Run, fill: Fill) -> None:
    run.save({"m": {"w": torch.zeros(300, 300)}}, step=1, storing=Storing(precision="bf16"))
    with pytest.raises(
        IncompatibleState,
        match=r"w is bfloat16\[300, 300\], target float16.*\(float32 before its save\)",
    ) as caught:
        fill(run, {"w": torch.zeros(300, 300).half()})
    assert "strict=False" not in str(caught.value)
    with pytest.raises(IncompatibleState, match=r"v is not in the checkpoint.*strict=False"):
        fill(run, {"w": torch.zeros(300, 300), "v": torch.zeros(3)})


def test_the_prefix_of_a_distributed_module_is_explained(run: Run, fill: Fill) -> None:
    plain = {"a.w": torch.zeros(3), "b": torch.ones(2)}
    wrapped = {f"module.{name}": value for name, value in plain.items()}
    run.save({"m": plain}, step=1)
    with pytest.raises(IncompatibleState, match=r"pass the module inside, `model\.module`"):
        fill(run, wrapped)
    run.save({"m": wrapped}, step=2)
    with pytest.raises(IncompatibleState, match=r"was saved: save the module inside"):
        fill(run, plain)
