"""Trainers that shard the model: the digests of unsharded saves, killed, resumed on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.adapters.trainers.children import KILLED, Ranks, needs
from tests.support.loads import components

pytestmark = needs("lightning", "transformers", "accelerate")


def states(reg: holdfast.Registry, name: str) -> dict[int, Any]:
    """Return the ids of adapter or model, and of the optimizer, by step."""
    names = ("adapter", "model", "optimizer")
    return {
        step: [parts[one] for one in names if one in parts]
        for step, parts in components(reg, name).items()
    }


def test_lightning(reg: holdfast.Registry, ranks: Ranks) -> None:
    fit = "lightning_shards.fit"
    assert ranks.run(1, fit, "alone", "plain", None) == [0]
    assert ranks.run(1, fit, "killed", "fsdp2", 5) == [KILLED]
    assert list(states(reg, "killed")) == [4]
    assert ranks.run(2, fit, "killed", "fsdp", None) == [0, 0]
    assert states(reg, "killed") == states(reg, "alone")


@pytest.mark.soak
def test_the_hf_trainer(reg: holdfast.Registry, ranks: Ranks, tmp_path: Path) -> None:
    train, out = "transformers_shards.train", tmp_path / "out"
    assert ranks.run(1, train, "alone", out, False, None) == [0]
    assert ranks.run(2, train, "killed", out, True, 5) == [KILLED, KILLED]
    assert list(states(reg, "killed")) == [2, 4]
    assert ranks.run(2, train, "killed", out, True, None) == [0, 0]
    assert states(reg, "killed") == states(reg, "alone")


@pytest.mark.soak
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("first", "second"), [((True, 2), (False, 1)), ((False, 2), (True, 2))])
def test_the_hf_trainer_continues_sharded_or_not(
    reg: holdfast.Registry,
    ranks: Ranks,
    tmp_path: Path,
    adapter: bool,
    first: tuple[bool, int],
    second: tuple[bool, int],
) -> None:
    train, out = "transformers_shards.train", tmp_path / "out"
    assert ranks.run(1, train, "alone", out, False, None, adapter) == [0]
    (shards, many), (others, few) = first, second
    assert ranks.run(many, train, "killed", out, shards, 5, adapter) == [KILLED] * many
    assert ranks.run(few, train, "killed", out, others, None, adapter) == [0] * few
    assert states(reg, "killed") == states(reg, "alone")


def test_a_loop_with_accelerate(reg: holdfast.Registry, ranks: Ranks) -> None:
    assert ranks.run(2, "transformers_shards.loop", "loop") == [0, 0]
    saved = {name: states(reg, name) for name in ("loop", "alone", "resumed")}
    assert saved["loop"] == saved["alone"]
    assert saved["resumed"][3] == saved["alone"][3]


#: How a training begins and is killed, and how it continues: strategy and number of ranks.
MOVES = [
    (("fsdp", 2), ("fsdp2", 1)),
    (("fsdp2", 2), ("plain", 2)),
    (("plain", 1), ("fsdp2", 2)),
    (("fsdp", 1), ("fsdp2", 2)),
    (("plain", 2), ("fsdp", 1)),
    (("fsdp2", 3), ("fsdp", 2)),
]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_any_strategy_of_lightning_continues_any_other(
    reg: holdfast.Registry, ranks: Ranks
) -> None:
    fit = "lightning_shards.fit"
    assert ranks.run(1, fit, "alone", "plain", None) == [0]
    for number, ((first, many), (second, few)) in enumerate(MOVES):
        name = f"moved-{number}"
        assert ranks.run(many, fit, name, first, 5) == [KILLED] * many
        assert ranks.run(few, fit, name, second, None) == [0] * few
        if 3 not in (many, few):  # a mean over 3 ranks rounds
            assert states(reg, name) == states(reg, "alone")
    assert not reg.verify(deep=True).findings


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_a_rank_that_dies_in_a_save_and_the_resumed_training(
    reg: holdfast.Registry, ranks: Ranks, kind: str
) -> None:
    assert ranks.run(2, "lightning_shards.fit", "straight", kind, None) == [0, 0]
    assert ranks.run(2, "lightning_shards.fit_until_a_rank_dies", "run", kind) == [3, KILLED]
    assert ranks.run(2, "lightning_shards.fit", "run", kind, None) == [0, 0]
    assert states(reg, "run") == states(reg, "straight")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_a_signal_to_one_rank_saves_on_all(reg: holdfast.Registry, ranks: Ranks, kind: str) -> None:
    fit = "lightning_shards.fit_until_asked"
    assert ranks.run(2, fit, "asked", kind, 3) == [143, 143]
    assert list(states(reg, "asked")) == [4]
    assert reg.run("asked").status == "interrupted"
    assert ranks.run(2, fit, "asked", kind, None) == [0, 0]
    assert ranks.run(2, "lightning_shards.fit", "straight", kind, None) == [0, 0]
    assert states(reg, "asked") == states(reg, "straight")
