"""Retention: each policy alone, protected checkpoints, and both over arbitrary runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Monitor
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.history.retention import has_policies, plan_retention
from holdfast.registry.spec import Phase, Retention, RunSpec, Tier
from tests.support.lives import DAY_MS, Life, evicted, kept, reasons
from tests.support.strategies import examples

LOSS = Monitor(metric="loss", mode="min")
ACC = Monitor(metric="acc", mode="max")


def life(losses=(), *, monitors=(), **policy) -> Life:
    """Return a run with a checkpoint for each loss, at step 10, 20, ..., commits 1, 2, ..."""
    retention = Retention(**policy) if policy else None
    run = Life(RunSpec(monitors=monitors, retention=retention))
    for i, loss in enumerate(losses, 1):
        run.save(10 * i, metrics={} if loss is None else {"loss": loss})
    return run


def plan(run: Life, override: Retention | None = None):
    return plan_retention(run.manifest, run.now_ms, override)


# Each policy alone


def test_without_a_policy_everything_stays():
    found = plan(life([1.0, 2.0, 3.0]))
    assert kept(found) == [1, 2, 3]
    assert reasons(found, 2) == ("all",)


@pytest.mark.parametrize("last", [1, 2, 3, 9])
def test_last_keeps_the_newest(last):
    found = plan(life([None] * 5, last=last))
    assert kept(found) == [1, 2, 3, 4, 5][-last:]
    assert reasons(found, 5) == ("latest", f"last {last}")


def test_best_keeps_the_best_by_the_first_monitor():
    found = plan(life([3.0, 1.0, 2.0, 5.0, 4.0], monitors=(LOSS, ACC), best=2))
    assert kept(found) == [2, 3, 5]
    assert reasons(found, 2) == ("best/loss", "best 2")
    assert reasons(found, 3) == ("best 2",)
    assert reasons(found, 5) == ("latest",)


def test_every_keeps_multiples_of_steps():
    found = plan(life([None] * 7, every=30))
    assert kept(found) == [3, 6, 7]
    assert reasons(found, 3) == ("every 30",)


def test_for_days_keeps_the_young_and_not_what_is_just_too_old():
    run = life([None] * 5, for_days=2)
    assert kept(plan(run)) == [4, 5]  # commit 5 is of now, commit 3 of two days ago
    assert kept(plan_retention(run.manifest, run.now_ms - 1)) == [3, 4, 5]
    assert kept(plan_retention(run.manifest, run.now_ms + 9 * DAY_MS)) == [5]
    assert reasons(plan(run), 4) == ("for 2 days",)


def test_all_keeps_all():
    run = life([None] * 3, all=True).rewind(1)
    assert kept(plan(run)) == [1, 2, 3]


def test_policies_add_up():
    run = life([5.0, 1.0, 4.0, 3.0, 2.0], monitors=(LOSS,), last=1, best=1, every=30)
    assert kept(plan(run)) == [2, 3, 5]


def test_each_verdict_says_why():
    run = life([5.0, 1.0, 4.0], monitors=(LOSS,), last=1, best=1, every=40, for_days=1)
    found = plan(run)
    assert reasons(found, 1) == (
        "not among last 1, best 1, every 40, 1 days of phase main; no pin",
    )


# Protected checkpoints


def test_every_monitor_protects_its_best():
    run = Life(RunSpec(monitors=(LOSS, ACC), retention=Retention(last=1)))
    run.save(1, metrics={"loss": 1.0, "acc": 0.1}).save(2, metrics={"loss": 2.0, "acc": 0.9})
    run.save(3, metrics={"loss": 3.0}).save(4)
    found = plan(run)
    assert kept(found) == [1, 2, 4]
    assert (reasons(found, 1), reasons(found, 2)) == (("best/loss",), ("best/acc",))


def test_nan_and_missing_are_never_best():
    found = plan(life([math.nan, None, 7.0, 8.0], monitors=(LOSS,), last=1))
    assert kept(found) == [3, 4]


def test_gates_and_tags_protect_superseded_ones_too():
    run = life([None] * 4, last=1).gate(1).tag(3).rewind(2).save(30)
    found = plan(run)
    assert reasons(found, 1) == ("gates/g",)
    assert reasons(found, 3) == ("tags/t",)
    assert evicted(found) == [2, 4]


def test_a_tag_that_moved_on_protects_no_more():
    run = life([None] * 3, last=1).tag(1).tag(2)
    assert evicted(plan(run)) == [1]


def test_what_a_follower_works_on_stays_until_its_time_is_over():
    run = life([None] * 3, last=1).claim(1, until_ms=100 * DAY_MS)
    assert reasons(plan(run), 1) == ("held by evals",)
    assert evicted(plan_retention(run.manifest, 100 * DAY_MS)) == [1, 2]
    assert evicted(plan(run.acknowledge(1))) == [1, 2]


def test_the_newest_of_each_phase_stays():
    run = life(last=1)
    run.save(1, "a").save(2, "a").save(3, "b").save(4, "b").save(5, "a")
    found = plan(run)
    assert kept(found) == [4, 5]
    assert reasons(found, 4) == ("latest", "last 1")


def test_the_newest_stays_beside_a_newer_one_that_is_held_back():
    run = life([None] * 2, last=1).save(30, nonfinite=("w",), held_back=True)
    found = plan(run)
    assert kept(found) == [2, 3]
    assert (reasons(found, 2), reasons(found, 3)) == (
        ("latest",),
        ("newest, held back", "last 1"),
    )


def test_what_is_held_back_is_never_best():
    run = life([5.0], monitors=(LOSS,), last=1, best=1)
    run.save(20, metrics={"loss": 1.0}, nonfinite=("w",), held_back=True).save(30)
    assert kept(plan(run)) == [1, 3]


def test_what_was_brought_back_stays_until_somebody_says_otherwise():
    run = life([None] * 4, last=1)
    run.execute(plan(run)).recover(2)
    found = plan(run)
    assert (kept(found), evicted(found)) == ([2, 4], [])
    assert reasons(found, 2) == ("brought back by hand",)
    assert evicted(plan(run, Retention(last=1))) == [2]


# Superseded ones


def test_superseded_ones_go_first():
    run = life([None] * 3, last=3).rewind(1).save(21).save(22)
    # 2 and 3 are newer than 1 in the log, and behind it in what is kept.
    assert evicted(plan(run)) == [2, 3]
    assert kept(plan(run)) == [1, 5, 6]


def test_superseded_ones_are_kept_while_there_is_room():
    run = life([None] * 3, last=4).rewind(1).save(21).save(22)
    found = plan(run)
    assert evicted(found) == [2]
    assert reasons(found, 2) == ("superseded; not among last 4 of phase main; no pin",)


def test_only_last_keeps_superseded_ones():
    run = life([1.0, 0.5], monitors=(LOSS,), best=1, every=20, for_days=99).rewind(1)
    run.save(30, metrics={"loss": 9.0})
    assert evicted(plan(run)) == [2]


# Counting what is protected anyway


def test_counts_protected_keeps_so_many_in_all():
    policy = {"last": 3, "counts_protected": True, "monitors": (LOSS,)}
    run = life([5.0, 1.0, 4.0, 4.0, 4.0, 4.0], **policy).tag(1)
    assert kept(plan(run)) == [1, 2, 6]  # tagged, best, newest: no room for others
    loose = life([5.0, 1.0, 4.0, 4.0, 4.0, 4.0], monitors=(LOSS,), last=3).tag(1)
    assert kept(plan(loose)) == [1, 2, 4, 5, 6]


def test_counts_protected_keeps_more_only_where_more_are_protected():
    run = life([None] * 5, last=2, counts_protected=True)
    for n in (1, 2, 3):
        run.tag(n, f"t{n}")
    assert kept(plan(run)) == [1, 2, 3, 5]


# Waiting for metrics


def test_a_checkpoint_waits_for_its_metric_until_enough_newer_ones_came():
    run = life([None], monitors=(LOSS,), last=1, wait=2)
    run.save(20, metrics={"loss": 1.0})
    assert reasons(plan(run), 1) == ("waits for loss (1 of 2)",)
    run.save(30, metrics={"loss": 2.0})
    assert evicted(plan(run)) == [1]


def test_a_checkpoint_whose_metric_came_waits_no_more():
    run = life([None], monitors=(LOSS,), last=1, wait=5).save(20, metrics={"loss": 1.0})
    assert evicted(plan(run)) == []
    assert evicted(plan(run.report(1, loss=3.0))) == [1]
    assert evicted(plan(run.report(1, loss=0.5))) == []  # now it is the best


def test_what_went_meanwhile_was_newer_all_the_same():
    """Otherwise a checkpoint would wait again, and take the room of another one."""
    run = life([None], monitors=(LOSS,), last=3, wait=3)
    for step in (20, 30, 40):
        run.save(step, metrics={"loss": float(step)})
    assert evicted(plan(run.evict(3))) == []
    assert reasons(plan(run), 1) == ("last 3",)


def test_nan_is_an_answer_and_a_part_of_a_sum_is_none():
    skill = Monitor(metric="mu - 3*sigma", mode="max")
    run = Life(RunSpec(monitors=(skill,), retention=Retention(last=1, wait=9)))
    run.save(1, metrics={"mu": 1.0}).save(2, metrics={"mu": math.nan, "sigma": 1.0}).save(3)
    found = plan(run)
    assert evicted(found) == [2]
    assert reasons(found, 1) == ("waits for sigma (2 of 9)",)


# Tiers


TIERED = RunSpec(
    phases=(
        Phase(
            name="main",
            monitors=(LOSS,),
            tiers=(
                Tier(name="milestone", retention=Retention(last=2)),
                Tier(name="rolling", retention=Retention(last=1)),
            ),
        ),
    )
)


def test_each_tier_counts_for_itself():
    run = Life(TIERED)
    for i, tier in enumerate(["milestone", "rolling", "milestone", "rolling", "milestone"], 1):
        run.save(i, tier=tier)
    found = plan(run)
    assert kept(found) == [3, 4, 5]
    assert reasons(found, 1) == ("not among last 2 of tier milestone; no pin",)
    assert reasons(found, 2) == ("not among last 1 of tier rolling; no pin",)


def test_the_best_of_a_tier_is_among_its_own():
    tiers = (
        Tier(name="a", retention=Retention(best=1)),
        Tier(name="b", retention=Retention(last=1)),
    )
    run = Life(RunSpec(phases=(Phase(name="main", monitors=(LOSS,), tiers=tiers),)))
    run.save(1, tier="b", metrics={"loss": 0.0}).save(2, tier="a", metrics={"loss": 1.0})
    run.save(3, tier="a", metrics={"loss": 2.0}).save(4, tier="b", metrics={"loss": 9.0})
    found = plan(run)
    assert kept(found) == [1, 2, 4]
    assert reasons(found, 2) == ("best 1",)


def test_an_override_counts_across_no_tiers_and_undoes_no_protection():
    run = Life(TIERED)
    for i in range(1, 5):
        run.save(i, tier="rolling" if i % 2 else "milestone", metrics={"loss": float(i)})
    assert kept(plan(run, Retention(last=1))) == [1, 3, 4]


@pytest.mark.parametrize(
    ("spec", "has"),
    [
        (RunSpec(), False),
        (RunSpec(phases=(Phase(name="1"),)), False),
        (RunSpec(retention=Retention(all=True)), True),
        (RunSpec(phases=(Phase(name="1"), Phase(name="2", retention=Retention(last=1)))), True),
        (TIERED, True),
    ],
)
def test_a_run_with_any_policy_has_policies(spec, has):
    assert has_policies(spec) is has


# Arbitrary policies over arbitrary runs

counts = st.none() | st.integers(1, 4)


@st.composite
def policies(draw) -> Retention:
    if draw(st.integers(0, 9)) == 0:
        return Retention(all=True)
    fields = {
        "last": draw(counts),
        "best": draw(counts),
        "every": draw(st.none() | st.integers(2, 4)),
        "for_days": draw(counts),
        "wait": draw(st.integers(0, 3)),
    }
    if not any(fields[name] for name in ("last", "best", "every", "for_days")):
        fields["last"] = 1
    counted = fields["last"] is not None and draw(st.booleans())
    return Retention(**fields, counts_protected=counted)


specs = st.one_of(
    st.builds(lambda one: RunSpec(monitors=(LOSS, ACC), retention=one), policies()),
    st.builds(
        lambda one, two, three: RunSpec(
            phases=(
                Phase(
                    name="a",
                    monitors=(LOSS, ACC),
                    tiers=(Tier(name="x", retention=one), Tier(name="y", retention=two)),
                ),
                Phase(name="b", monitors=(ACC,), retention=three),
            )
        ),
        policies(),
        policies(),
        policies(),
    ),
)
values = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])


@st.composite
def lives(draw) -> Life:
    run = Life(draw(specs))
    tiered = bool(run.manifest.spec.phases)
    for step in range(draw(st.integers(1, 14))):
        phase = "a" if not tiered or step < 8 else "b"
        run.save(
            step,
            phase,
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), values)),
            tier=draw(st.sampled_from("xy")) if tiered and phase == "a" else None,
            held_back=draw(st.sampled_from([None, None, None, True])),
        )
        known = [record.n for record in run.manifest.checkpoints if record.evicted is None]
        n = draw(st.sampled_from(known))
        match draw(st.sampled_from(["", "", "", "", "tag", "gate", "claim", "rewind", "evict"])):
            case "tag":
                run.tag(n)
            case "gate":
                run.gate(n, f"g{step}")
            case "claim":
                run.claim(n, until_ms=draw(st.integers(0, 30)) * DAY_MS)
            case "rewind":
                run.rewind(n)
            case "evict":
                run.execute(plan(run))
    return run


def _must_stay(manifest: RunManifest, now_ms: int) -> set[int]:
    """Return the checkpoints that every policy must keep, computed in a second way."""
    held = {p.checkpoint for p in manifest.pins} | {
        claim.checkpoint for g in manifest.groups for claim in g.claims if claim.until_ms > now_ms
    }
    for phase in {record.phase for record in manifest.checkpoints}:
        live = [
            record
            for record in manifest.checkpoints
            if record.phase == phase and not record.superseded and record.evicted is None
        ]
        held |= {record.n for record in live[-1:]}
        sound = [record for record in live if not record.held_back]
        held |= {record.n for record in sound[-1:]}
        for monitor in manifest.spec.phase(phase).monitors:
            rated = [r for r in sound if not math.isnan(r.metrics.get(monitor.metric, math.nan))]
            sign = 1 if monitor.mode == "min" else -1
            best = sorted(rated, key=lambda r: (sign * r.metrics[monitor.metric], r.n))
            held |= {record.n for record in best[:1]}
    return held


@examples(80)
@given(lives())
def test_a_plan_is_complete_gives_reasons_and_spares_what_must_stay(run):
    found = plan(run)
    kept_back = [record.n for record in run.manifest.checkpoints if record.evicted is None]
    assert sorted(kept(found) + evicted(found)) == kept_back
    assert (kept(found), evicted(found)) == (sorted(kept(found)), sorted(evicted(found)))
    assert all(verdict.reasons and all(verdict.reasons) for verdict in found.kept + found.evicted)
    assert _must_stay(run.manifest, run.now_ms) & set(kept_back) <= set(kept(found))


@examples(80)
@given(lives())
def test_after_a_plan_is_carried_out_there_is_nothing_to_do(run):
    now_ms, found = run.now_ms, plan(run)
    again = plan_retention(run.execute(found).manifest, now_ms)
    assert (kept(again), evicted(again)) == (kept(found), [])


@examples(60)
@given(lives())
def test_last_alone_keeps_so_many_and_counted_together_no_more(run):
    spec = run.manifest.spec
    found = plan(run)
    for phase, tier, policy in [
        *((p.name, t.name, t.retention) for p in spec.phases for t in p.tiers),
        *((p.name, None, p.retention) for p in spec.phases if p.retention),
        *((("a", None, spec.retention),) if spec.retention else ()),
    ]:
        ours = [
            v
            for v in (*found.kept, *found.evicted)
            if (v.checkpoint.phase, v.checkpoint.tier) == (phase, tier)
        ]
        stay = [v for v in ours if v in found.kept]
        if policy.all:
            assert stay == ours
        if policy.last is None:
            continue
        assert len(stay) >= min(len(ours), policy.last) or policy.counts_protected
        others = {f"every {policy.every}", f"best {policy.best}", f"for {policy.for_days} days"}
        if policy.counts_protected:
            by_last_alone = [
                v
                for v in stay
                if f"last {policy.last}" in v.reasons and not set(v.reasons) & others
            ]
            protected = [v for v in stay if set(v.reasons) - others - {f"last {policy.last}"}]
            assert len(by_last_alone) + len(protected) <= max(policy.last, len(protected))
