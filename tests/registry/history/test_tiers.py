"""Tiers: which one takes a checkpoint, and which one it rises to by metrics that come late."""

from __future__ import annotations

import pytest

from holdfast import Monitor
from holdfast.registry.history.retention import choose_tier, tier_after_report
from holdfast.registry.spec import Phase, Retention, RunSpec, Tier
from tests.support.lives import Life

LOSS = Monitor(metric="loss", mode="min")
ACC = Monitor(metric="acc", mode="max", name="accuracy")
KEEP = Retention(all=True)


def tier(name: str, **fields) -> Tier:
    return Tier(name=name, retention=KEEP, **fields)


PHASE = Phase(
    name="main",
    counter="update",
    monitors=(LOSS, ACC),
    tiers=(
        tier("milestone", every=100),
        tier("record", improves=("loss",)),
        tier("epoch", every=2, counter="epoch"),
        tier("rolling"),
    ),
)
SPEC = RunSpec(phases=(PHASE, Phase(name="flat", monitors=(LOSS,))))


def chosen(life: Life, metrics=None, update: int = 7, epoch: int = 7) -> str | None:
    return choose_tier(life.manifest, PHASE, metrics or {}, {"update": update, "epoch": epoch})


def test_the_first_that_takes_it_has_it():
    life = Life(SPEC)
    assert chosen(life, {"loss": 1.0}, update=200, epoch=2) == "milestone"
    assert chosen(life, {"loss": 1.0}, epoch=2) == "record"
    assert chosen(life, epoch=2) == "epoch"
    assert chosen(life) == "rolling"


def test_a_counter_of_nought_is_a_multiple():
    assert chosen(Life(SPEC), update=0) == "milestone"


def test_only_what_is_better_than_the_best_of_its_phase_improves():
    life = Life(SPEC).save(1, "flat", metrics={"loss": 0.0}).save(2, metrics={"loss": 1.0})
    assert chosen(life, {"loss": 0.5}) == "record"
    assert chosen(life, {"loss": 1.0}) == "rolling"
    assert chosen(life, {"loss": 2.0}) == "rolling"
    assert chosen(life, {"loss": float("nan")}) == "rolling"
    assert chosen(life, {"acc": 9.0}) == "rolling"  # another monitor than the tier's


def test_what_is_superseded_or_held_back_is_nothing_to_beat():
    life = Life(SPEC).save(1).save(2, metrics={"loss": 0.1})
    assert chosen(life, {"loss": 0.5}) == "rolling"
    assert chosen(life.rewind(1), {"loss": 0.5}) == "record"
    life.save(3, metrics={"loss": 0.1}, held_back=True)
    assert chosen(life, {"loss": 0.5}) == "record"


def test_without_tiers_there_is_none():
    assert choose_tier(Life(SPEC).manifest, SPEC.phase("flat"), {"loss": 1.0}, {}) is None


def lived() -> Life:
    life = Life(SPEC).save(1, tier="rolling", metrics={"loss": 1.0}).save(2, tier="rolling")
    return life.save(3, tier="milestone").save(4, "flat")


@pytest.mark.parametrize(
    ("n", "metrics", "rises_to"),
    [
        (2, {"loss": 0.5}, "record"),
        (2, {"loss": 1.0}, None),  # no better than the best
        (2, {"acc": 9.0}, None),
        (1, {"loss": 0.9}, "record"),  # its own value is not to be beaten
        (1, {"acc": 1.0}, "record"),  # the best all along: nobody else has a value
        (3, {"loss": 0.1}, None),  # nothing stands above its tier
        (4, {"loss": 0.1}, None),  # a phase without tiers
        (9, {"loss": 0.1}, None),  # no checkpoint
    ],
)
def test_late_metrics_raise_a_checkpoint_and_never_lower_it(n, metrics, rises_to):
    assert tier_after_report(lived().manifest, n, metrics) == rises_to


def test_what_is_superseded_or_evicted_rises_no_more():
    better = {"loss": 0.5}
    assert tier_after_report(lived().rewind(1).manifest, 2, better) is None
    assert tier_after_report(lived().evict(2).manifest, 2, better) is None
