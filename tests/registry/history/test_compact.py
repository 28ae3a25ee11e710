"""A compact run is the complete one without what was evicted, whatever happened, in any steps."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.registry.curation.pool.promoting import rating_of
from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import (
    Acknowledge,
    Action,
    AddCheckpoint,
    AppendStream,
    ArchiveStream,
    Claim,
    Commit,
    DropRun,
    EnterPhase,
    Evict,
    EvictEntries,
    Eviction,
    Free,
    HideRun,
    Line,
    Mark,
    Promote,
    Rated,
    RateMatch,
    Recover,
    RemoveHold,
    RemoveTag,
    ReportMetrics,
    Rewind,
    SetHold,
    SetLabels,
    SetNote,
    SetPin,
    SetTag,
    UndropRun,
    line_digest,
)
from holdfast.registry.history.replay import NeedsHistory, RunManifest, Slot, advance, foresee
from holdfast.registry.history.replay.evicted import EvictedNumbers, pack_bits
from holdfast.registry.history.retention import RetentionPlan, plan_retention
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.spec.policies import Monitor
from holdfast.registry.values.records import Record
from tests.support.lives import DAY_MS, Life, creation, digest, place
from tests.support.strategies import examples

LOSS = Monitor(metric="loss", mode="min")
PHASES = ("a", "b")
TIERS = (None, "t", "u")
METRICS: tuple[dict[str, float], ...] = (
    {},
    {"loss": 1.0},
    {"loss": 2.0, "mu": 25.0, "sigma": 3.0},
    {"mu": 20.0},
    {"loss": float("nan"), "mu": 1.0, "sigma": 0.0},
)
LOOKUPS = ("by_n", "by_manifest", "by_pin", "by_version", "by_step", "by_class", "pinned", "uses")


def said(act: str, x: int, y: int, run: RunManifest) -> list[Action]:
    """Return actions of one kind, legal or not."""
    known = [one.n for one in run.checkpoints if one.evicted is None]
    gone = [one.n for one in run.evicted]
    # Where it makes a difference mostly those that it is about; now and then another one.
    about = gone if act in ("recover", "late") else known
    numbers = (about if x % 8 else [*known, *gone]) or [0]
    n, name = numbers[x % len(numbers)], f"n{y % 3}"
    manifest = digest(x % 7)
    match act:
        case "save":
            return [
                AddCheckpoint(
                    manifest=manifest,
                    phase=PHASES[y % 2],
                    step=x,
                    size_bytes=1,
                    metrics=METRICS[y % 5],
                    tier=TIERS[x % 3],
                    companions={"c": digest(y % 5)} if y % 3 == 0 else None,
                    held_back=True if x % 11 == 0 else None,
                )
            ]
        case "report" | "late":
            tier = TIERS[y % 3]
            return [ReportMetrics(checkpoint=n, metrics=METRICS[x % 5], tier=tier)]
        case "evict":
            going = {n, numbers[y % len(numbers)]}
            return [Evict(evictions=tuple(Eviction(checkpoint=m, reason="r") for m in going))]
        case "recover":
            return [Recover(checkpoints=(n,))]
        case "rewind":
            return [Rewind(to=None if y == 0 else n)]
        case "hold":
            return [SetHold(checkpoint=n if y % 3 else None, until_ms=x, reason="r")]
        case "unhold":
            return [RemoveHold(checkpoint=n if y % 3 else None)]
        case "note":
            return [SetNote(checkpoint=n if y % 3 else None, text="n" * (y % 4))]
        case "label":
            return [SetLabels(labels=("a", "b")[: y % 3])]
        case "tag":
            return [SetTag(name=name, checkpoint=n)]
        case "untag":
            return [RemoveTag(name=name)]
        case "gate":
            named = run.by_n.get(n)
            standing = run.pin("gate", name)
            return [
                SetPin(
                    kind="gate",
                    name=name,
                    manifest=named.manifest if named else manifest,
                    checkpoint=n,
                    replaces=standing.manifest if standing and y % 2 else None,
                )
            ]
        case "release":
            pin = SetPin(
                kind="release", name=f"1.0.{x}", manifest=manifest, checkpoint=n, card=digest(y)
            )
            return [pin]
        case "promote":
            version = run.next_version
            promote = Promote(
                version=version, manifest=manifest, phase="a", step=x, mu=1.0, sigma=1.0
            )
            return [promote]
        case "rate":
            rated = Rated(
                version=1 + y % max(1, run.next_version - 1), mu=x / 2, sigma=1.0, games=1, wins=0
            )
            return [RateMatch(match=f"m{x}", ratings=(rated,))]
        case "leave":
            return [EvictEntries(versions=(1 + y % max(1, run.next_version - 1),), reason="r")]
        case "append":
            stream = run.stream(name)
            start = x % (stream.count + 1) if stream else 0
            return [
                AppendStream(
                    stream=name,
                    lifetime="resettable",
                    manifest=manifest,
                    start=start,
                    count=x + 1,
                    first_step=0,
                    last_step=x,
                )
            ]
        case "archive":
            return [ArchiveStream(stream=name, label=f"l{x}")]
        case "claim":
            until_ms = y * DAY_MS
            return [Claim(group=name, checkpoint=n, follower="f", until_ms=until_ms)]
        case "acknowledge":
            return [Acknowledge(group=name, checkpoint=n, follower="f")]
        case "enter":
            frozen = {"k": digest(y % 5)}
            return [
                EnterPhase(
                    from_phase="a",
                    to_phase="b",
                    source="latest",
                    manifest=manifest,
                    rows=(),
                    enabled=(),
                    ready={},
                    companions=frozen,
                )
            ]
        case "drop":
            return [DropRun(reason="enough")]
        case "hide":
            return [HideRun(reason="perhaps")]
        case "undrop":
            return [UndropRun()]
    raise AssertionError(act)


ACTS = (
    *["save"] * 6,
    *["report", "late", "evict", "evict", "evict", "rewind", "recover", "gate", "release"],
    *[
        "tag",
        "tag",
        "untag",
        "hold",
        "hold",
        "unhold",
        "note",
        "note",
        "label",
        "hide",
        "free",
        *["undrop"] * 4,
    ],
    *["promote", "rate", "leave", "append", "append", "archive", "claim", "acknowledge", "enter"],
)
small = st.integers(0, 40)
actions = st.tuples(st.sampled_from(ACTS), small, small)
#: Actions of one commit, whether it gives places to what they name, and whether a mark follows.
slots = st.tuples(st.lists(actions, min_size=1, max_size=3), st.sampled_from([True, True, False]))
lives = st.lists(slots, min_size=10, max_size=40)


def _manifests(actions: list[Action]) -> list[Any]:
    found = []
    for action in actions:
        for name in ("manifest", "card"):
            found += [getattr(action, name)] if getattr(action, name, None) else []
        found += (getattr(action, "companions", None) or {}).values()
    return found


def slot_of(run: RunManifest, parts: list[tuple[str, int, int]], *, placed: bool) -> Slot:
    """Return the next slot of a run."""
    if any(act == "free" for act, *_ in parts):
        return Slot.build(run.next_slot, [Free()])
    saves = [one for one in parts if one[0] == "save"][:1]
    others = [one for one in parts if one[0] != "save"]
    said_now = [action for part in (*saves, *others) for action in said(*part, run)]
    if any(act == "undrop" for act, *_ in parts):
        said_now = [UndropRun()]
    lines: list[Line] = []
    if placed:
        # The same place again, or another one: as a save of the same state, or a repack.
        at = parts[0][2] % 4
        named = run.uses if said_now == [UndropRun()] else _manifests(said_now)
        lines += [place(manifest, at) for manifest in dict.fromkeys(named)]
    commit = Commit(
        n=run.commits,
        run="r",
        prev=run.head,
        write="w",
        author="me@here",
        time_ms=run.commits * DAY_MS,
        actions=tuple(said_now),
    )
    lines.append(commit)
    if parts[0][1] % 13 == 0:
        lines.append(Mark(epoch=parts[0][1] + 1))
    return Slot.build(run.next_slot, lines)


def grown(compact: RunManifest, complete: RunManifest, slots: list[Slot]) -> RunManifest:
    """Return a compact run after slots, as a handle goes on: by the complete one where it must."""
    try:
        return advance(compact, slots)
    except NeedsHistory:
        return advance(complete, slots).compact()


def shown(value: object) -> object:
    """Return what to compare by: NaN is not equal to itself, nor is one order of keys another."""
    match value:
        case Record():
            return value.encode()
        case RetentionPlan():
            verdicts = (*value.kept, None, *value.evicted)
            return [one and (one.checkpoint.n, one.reasons) for one in verdicts]
        case list() | tuple():
            return [shown(one) for one in value]
    return value


def refusal(run: RunManifest, slot: Slot) -> str:
    """Return why a slot cannot follow; nothing where it can."""
    try:
        advance(run, [slot])
    except Malformed as error:
        return str(error)
    except NeedsHistory:
        return "forgotten"
    return ""


def check_same(compact: RunManifest, complete: RunManifest) -> None:
    """Check that a compact run says what the complete one says."""
    assert compact.encode() == complete.compact().encode()
    fresh = RunManifest.decode(compact.encode(), where="x")
    for lookup in LOOKUPS:
        carried, made = (getattr(of, lookup) for of in (compact, fresh))
        assert carried.keys() == made.keys(), lookup
        assert all(shown(carried[key]) == shown(made[key]) for key in made), lookup
    for of in (compact, fresh):
        assert shown(of.live()) == shown(complete.live())
        assert of.held == complete.held
        assert of.holders() == complete.holders()
        assert shown(of.roster()) == shown(complete.roster())
        assert of.count == len(complete.checkpoints)
        assert of.evicted_count == complete.evicted_count == len(complete.evicted)
        assert of.superseded_count == complete.superseded_count
        assert of.has_checkpoints == complete.has_checkpoints
        assert set(of.phases_saved) == set(complete.phases_saved)
        for one in complete.checkpoints:
            assert of.is_evicted(one.n) == (one.evicted is not None)
            assert of.is_superseded(one.n) == one.superseded
        for phase in (None, *PHASES):
            assert shown(of.latest(phase)) == shown(complete.latest(phase))
            assert shown(of.best(LOSS, phase)) == shown(complete.best(LOSS, phase))
            assert shown(of.ranked(LOSS, phase)) == shown(complete.ranked(LOSS, phase))
        for phase in PHASES:
            assert of.saved_in(phase) == complete.saved_in(phase)
            for tier in TIERS:
                assert of.evicted_on_line(phase, tier) == complete.evicted_on_line(phase, tier)
        for policy in POLICIES:
            now_ms = complete.commits * DAY_MS
            plan = plan_retention(complete, now_ms, policy)
            assert shown(plan_retention(of, now_ms, policy)) == shown(plan)
        with suppress(NeedsHistory):  # asked again of the complete one
            assert rating_of(of, {}) == rating_of(complete, {})
        for place_ in complete.places:
            assert of.is_placed(place_) == complete.is_placed(place_)


POLICIES = (
    None,
    Retention(last=2),
    Retention(last=1, best=2, wait=9),
    Retention(every=3, for_days=2),
    Retention(last=3, counts_protected=True),
)


@examples(50)
@given(lives, st.integers(1, 5))
@example([([("save", 3, 0)], True), ([("evict", 0, 0)], True), ([("save", 3, 1)], False)], 1)
def test_whatever_happens_a_compact_run_is_the_complete_one(life, together):
    complete = advance(RunManifest(run_id="r"), [Slot.build(0, [_begun()])])
    compact = complete.compact()
    waiting: list[Slot] = []
    behind = complete
    for parts, placed in life:
        slot = None
        legal: list[tuple[str, int, int]] = []
        for part in parts:
            tried = slot_of(complete, [*legal, part], placed=placed)
            illegal = refusal(complete, tried)
            if not illegal:
                legal, slot = [*legal, part], tried
            elif len(waiting) == 0:
                # What is illegal is so for a compact run as well, by the same words.
                assert refusal(compact, tried) in (illegal, "forgotten")
        if slot is None:
            continue
        complete = advance(complete, [slot])
        waiting.append(slot)
        if len(waiting) >= together:
            # Asked before, so that what is asked is carried on.
            compact.prepare()
            compact.best(LOSS, "a")
            compact = grown(compact, behind, waiting)
            behind, waiting = complete, []
            check_same(compact, complete)


def _begun() -> Commit:
    return Commit(
        n=0, run="r", write="w", author="me@here", time_ms=0, actions=(creation(monitors=(LOSS,)),)
    )


def test_what_is_foreseen_is_what_comes():
    """Nothing is placed in it yet, and what a save asks of it was made before."""
    run = advance(RunManifest(run_id="r"), [Slot.build(0, [_begun()])]).compact()
    for step in range(1, 6):
        add = AddCheckpoint(manifest=digest(step), phase="a", step=step, size_bytes=1)
        actions: list[Action] = [add]
        if step > 2:
            gone = Eviction(checkpoint=step - 2, reason="r")
            actions.append(Evict(evictions=(gone,)))
        slot = slot_of(run, [("save", 0, 0)], placed=False)
        ((_, commit),) = slot.commits
        commit = commit.changed(actions=tuple(actions))
        foreseen = foresee(run, [commit])
        lines = [place(digest(step), step), commit]
        run = advance(run, [Slot.build(run.next_slot, lines)])
        assert foreseen.encode() == run.changed(places=foreseen.places).encode()
        assert [one.manifest for one in run.places] == [one.manifest for one in run.live()]


def test_a_compact_run_does_not_grow_with_what_was_evicted():
    """Ten times the evictions, and hardly a byte more for each: eight of them share one."""

    def lived(saves: int) -> int:
        run = advance(RunManifest(run_id="r"), [Slot.build(0, [_begun()])]).compact()
        slots = []
        head, n = run.head, run.commits
        for step in range(saves):
            add = AddCheckpoint(manifest=digest(step), phase="a", step=step, size_bytes=1)
            gone = () if step < 3 else (Evict(evictions=(Eviction(checkpoint=n - 3, reason="r"),)),)
            commit = Commit(
                n=n, run="r", prev=head, write="w", author="a", time_ms=0, actions=(add, *gone)
            )
            slots.append(Slot.build(n, [place(digest(step), 0), commit]))
            head, n = line_digest(slots[-1].commits[-1][0]), n + 1
        return len(advance(run, slots).encode())

    assert lived(2000) - lived(200) < 1800 / 4 + 64


@pytest.mark.parametrize(
    "text", ["", "1", "0:", "0:0x1", "1:2", "0:A", "0:01", "-1:1", "999999999:1", "0:1_0", "+0:1"]
)
def test_bits_have_one_spelling(text):
    body = b'{"versions":"%s"}' % text.encode()
    with pytest.raises(Malformed):
        EvictedNumbers.decode(body, where="x")


@given(st.sets(st.integers(0, 5000)))
def test_bits_come_back(numbers):
    gone = EvictedNumbers(versions=pack_bits(numbers))
    read = EvictedNumbers.decode(gone.encode(), where="x")
    assert read == gone
    assert {n for n in range(5001) if read.versions >> n & 1} == numbers


def test_what_went_since_counts_for_those_that_wait():
    life = Life(RunSpec(monitors=(LOSS,)))
    for step in range(1, 7):
        life.save(step)
    life.evict(3, 4)
    for run in (life.manifest, life.manifest.compact()):
        plan = plan_retention(run, 0, Retention(last=1, wait=5))
        assert [one.checkpoint.n for one in plan.evicted] == [1]
        assert plan.kept[0].reasons == ("waits for loss (4 of 5)",)
