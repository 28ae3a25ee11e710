"""Two checkpoints side by side, and what that reads."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast import Registry
from holdfast.registry.ui.pages.diff import comparison, heat_map, offered, split_path
from tests.registry.ui.sources import source_of


def state(step: int, layers: int = 3) -> dict:
    grown = np.ones(500, np.float32)
    model = {f"layers.{i}.w": grown * (i + 1 if i else step) for i in range(layers)}
    model |= {f"layers.{i}.b": grown * 7 for i in range(layers)}
    return {"model": model | {"head": grown * step}, "step": step}


@pytest.fixture
def saved(reg: Registry) -> None:
    first = reg.create_run("a", config={"lr": 0.1, "depth": 3})
    first.save(state(1), step=1, metrics={"loss": 2.0, "old": 1.0})
    first.save(state(3), step=2, metrics={"loss": 1.5})
    reg.create_run("b", config={"lr": 0.2, "depth": 3}).save(state(1, 4), step=9)


def test_a_comparison_reads_manifests_alone(saved, backend) -> None:
    with source_of(backend) as source:
        source.run("a")
        with source.meter.measure() as used:
            found = comparison(source, "a/main/step1", "a/main/step2")
        # Both manifests, and twice a look whether the run has grown.
        assert used.calls == {"get": 4}
    assert not found.is_same
    assert {kind: count for kind, count, _ in found.counts} == {"changed": 2, "same": 5}
    assert [one.path for one in found.tensors] == ["model/layers.0.w", "model/head"]
    assert [(one.path, one.before, one.after) for one in found.values] == [("step", 1, 3)]
    assert [(one.name, one.change) for one in found.metrics] == [("loss", -0.5), ("old", None)]
    assert found.configs == ()


def test_the_runs_that_are_named_offer_their_checkpoints(saved, backend) -> None:
    with source_of(backend) as source:
        with source.meter.measure() as used:
            assert offered(source, ()) == ("a/latest", "b/latest")
        assert used.calls == {"list": 1}
        found = offered(source, ("a/main/step1", "gone/latest"))
    assert found == ("a/latest", "a/main/step00000002", "a/main/step00000001")


def test_configurations_of_two_runs_are_compared(saved, backend) -> None:
    with source_of(backend) as source:
        found = comparison(source, "a/main/step1", "b/latest")
    assert [str(one) for one in found.configs] == ["~ lr: 0.1 -> 0.2"]
    assert {one.kind for one in found.tensors} == {"added"}


def test_the_heat_map_shows_layers_in_which_something_moved(saved, backend) -> None:
    with source_of(backend) as source:
        found = heat_map(source, "a/main/step1", "a/main/step2")
    assert found.layers == ("model", "model/layers.0")
    assert found.parameters == ("b", "w", "head")
    # 1 became 3: the difference is twice as long as the vector before.
    assert found.cells == ((None, None, pytest.approx(2)), (0.0, pytest.approx(2), None))
    assert [one.path for one in found.tensors] == ["model/layers.0.w", "model/head"]
    assert (found.left, found.hidden) == (0, 0)
    assert found.read_bytes == 2 * 2 * 2000


def test_the_heat_map_stops_at_the_budget(saved, backend) -> None:
    with source_of(backend) as source:
        for ref in ("a/main/step1", "a/main/step2"):
            comparison(source, ref, ref)
        with source.meter.measure() as used:
            found = heat_map(source, "a/main/step1", "a/main/step2", budget_bytes=4000)
    assert [one.path for one in found.tensors] == ["model/layers.0.w"]
    assert (found.left, found.left_bytes, found.read_bytes) == (1, 4000, 4000)
    assert used.read_bytes < 12_000


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model/layers.10.attn.w", ("model/layers.10", "attn.w")),
        ("model/blocks/3/norm", ("model/blocks/3", "norm")),
        ("optimizer/state/0", ("optimizer/state", "0")),
        ("model/fc.weight", ("model/fc", "weight")),
        ("w", ("", "w")),
        ("model/h2.w", ("model/h2", "w")),
    ],
)
def test_a_path_is_a_layer_and_a_parameter(path: str, expected: tuple[str, str]) -> None:
    assert split_path(path) == expected
