"""A ref names exactly one checkpoint, or fails with near names."""

from __future__ import annotations

import pytest

from holdfast import Monitor
from holdfast.registry.errors import AmbiguousRef, InvalidInput, NotFound
from holdfast.registry.face.refs import is_digest
from holdfast.registry.spec import Retention
from tests.support.states import small_state


@pytest.fixture
def filled(reg):
    run = reg.create_run(
        "run", monitor=[Monitor(metric="loss", mode="min"), Monitor(metric="acc", mode="max")]
    )
    run.save(small_state(1), step=10, phase=1, metrics={"loss": 1.0, "acc": 0.1})
    run.save(small_state(2), step=20, phase=1, metrics={"loss": 2.0, "acc": 0.9})
    run.save(small_state(3), step=10, phase=2, metrics={"loss": 3.0})
    run.save(small_state(4), step=45000, phase="fine-tune", metrics={"loss": 4.0})
    run.pins.tags.set("keeper", run.checkpoints()[1])
    return run


@pytest.mark.parametrize(
    ("ref", "value"),
    [
        ("run", 4),
        ("run/", 4),
        ("run/latest", 4),
        ("run/best", 1),
        ("run/best/acc", 2),
        ("run/best/loss", 1),
        ("run/phase1/latest", 2),
        ("run/1/latest", 2),
        ("run/phase1/best", 1),
        ("run/phase1/best/acc", 2),
        ("run/phase2/step10", 3),
        ("run/phase2/step00000010", 3),
        ("run/fine-tune/latest", 4),
        ("run/fine-tune/step45000", 4),
        ("run/tags/keeper", 2),
    ],
)
def test_a_ref_finds_its_checkpoint(reg, filled, ref, value):
    assert reg.checkpoint(ref).load()["optimizer"]["step"] == value


def test_the_ref_of_a_checkpoint_finds_it_again(reg, filled):
    for checkpoint in filled.checkpoints():
        assert (
            reg.checkpoint(checkpoint.ref).handle.newest_record()
            == checkpoint.handle.newest_record()
        )


@pytest.mark.parametrize("length", [8, 12, 63, 64])
def test_digits_of_an_id_find_it_with_and_without_its_run(reg, filled, length):
    for checkpoint in filled.checkpoints():
        digits = checkpoint.digest.hex()[:length]
        for ref in (digits, f"sha256:{digits}", f"run/{digits}", f"run/sha256:{digits}"):
            assert reg.checkpoint(ref).digest == checkpoint.digest


def test_the_same_id_in_two_runs_is_one_checkpoint(reg, filled):
    other = reg.create_run("other")
    digest = other.save(small_state(1), step=1).digest
    assert reg.checkpoint(digest.hex()).digest == digest


MISSING = {
    "run": ("rum", "Did you mean 'run'"),
    "tag": ("run/tags/kepper", "Did you mean 'keeper'"),
    "phase": ("run/phase3/latest", "expected one of .*phase1.*tags/NAME.*Did you mean 'phase"),
    "phase's name": ("run/finetune/latest", "Did you mean 'fine-tune'"),
    "step": ("run/phase1/step15", "found steps 10, 20"),
    "step of a phase": ("run/phase2/step20", "found steps 10"),
    "monitor": ("run/best/losss", "Did you mean 'loss'"),
    "best without a value": ("run/phase2/best/acc", "found 1 checkpoints, none with the monitored"),
    "digits in a run": ("run/00000000", "no checkpoint with this id"),
    "digits": ("00000000", "no checkpoint with this id"),
}


@pytest.mark.parametrize(("ref", "message"), MISSING.values(), ids=MISSING.keys())
def test_what_is_not_there_suggests_what_is(reg, filled, ref, message):
    with pytest.raises(NotFound, match=message):
        reg.checkpoint(ref)


@pytest.mark.parametrize(
    "ref",
    [
        "run/latest/1",
        "run/best/acc/1",
        "run/phase1/newest",
        "run/phase1/step",
        "run/phase1/step-1",
        "run/phase1/step1/2",
        "run/nothing",
        "run/step10",
        "run/phase1",
    ],
)
def test_what_has_no_form_of_a_ref_is_told_the_forms(reg, filled, ref):
    with pytest.raises(InvalidInput, match=rf"{ref}: not a ref; expected RUN, RUN/latest"):
        reg.checkpoint(ref)


def test_an_empty_run_has_none_yet(reg):
    reg.create_run("empty")
    with pytest.raises(NotFound, match="empty/latest: there is none yet; found no checkpoints"):
        reg.checkpoint("empty")


def test_best_without_a_monitor_says_how_to_have_one(reg):
    reg.create_run("plain").save(small_state(), step=1)
    with pytest.raises(InvalidInput, match="no monitor to decide which checkpoint is best"):
        reg.checkpoint("plain/best")


def _with_equal_digits(reg, monkeypatch):
    from holdfast.registry.history.actions import AddCheckpoint
    from holdfast.registry.history.authorship import commit_line
    from holdfast.registry.history.log import RunLog
    from holdfast.registry.values.digest import Digest

    digests = [Digest(bytes.fromhex("abcdef12") + bytes([i]) * 28) for i in (1, 2)]
    for name in ("a", "b"):
        reg.create_run(name)
        log = RunLog(reg.handle.store, name)
        log.open()
        for i, digest in enumerate(digests):
            reg.handle.store.backend.put(f"manifests/ab/{digest.hex()}.0", b"")
            action = AddCheckpoint(manifest=digest, phase="main", step=i, size_bytes=0)
            log.append(lambda state, action=action: [commit_line(state, [action])])
    return digests


def test_digits_that_several_ids_begin_with_are_ambiguous(reg, monkeypatch):
    digests = _with_equal_digits(reg, monkeypatch)
    for ref in ("a/abcdef12", "abcdef12"):
        with pytest.raises(AmbiguousRef, match=r"several.*abcdef120101.*abcdef120202.*more digits"):
            reg.checkpoint(ref)
    assert reg.checkpoint("a/abcdef1201").digest == digests[0]
    assert reg.checkpoint("abcdef1202").digest == digests[1]


def test_digits_that_differ_between_runs_are_ambiguous(reg, monkeypatch):
    from holdfast.registry.history.actions import AddCheckpoint
    from holdfast.registry.history.authorship import commit_line
    from holdfast.registry.history.log import RunLog
    from holdfast.registry.values.digest import Digest

    for i, name in enumerate(("a", "b")):
        reg.create_run(name)
        log = RunLog(reg.handle.store, name)
        log.open()
        digest = Digest(bytes.fromhex("abcdef12") + bytes([i]) * 28)
        reg.handle.store.backend.put(f"manifests/ab/{digest.hex()}.0", b"")
        action = AddCheckpoint(manifest=digest, phase="main", step=i, size_bytes=0)
        log.append(lambda state, action=action: [commit_line(state, [action])])
    with pytest.raises(AmbiguousRef, match=r"found a/abcdef120000, b/abcdef120101.*RUN/DIGITS"):
        reg.checkpoint("abcdef12")


def test_a_run_called_like_digits_is_a_run(reg):
    reg.create_run("deadbeef").save(small_state(), step=1)
    assert reg.checkpoint("deadbeef").run_id == "deadbeef"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 8, True),
        ("sha256:" + "0" * 64, True),
        ("a" * 7, False),
        ("a" * 65, False),
        ("A" * 8, False),
        ("g" * 8, False),
        ("a" * 8 + "\n", False),
    ],
)
def test_eight_to_64_digits_are_those_of_an_id(text, expected):
    assert is_digest(text) is expected


def test_what_an_evicted_step_needs_is_told(reg):
    run = reg.create_run("gone", retention=Retention(last=1))
    run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    with pytest.raises(NotFound) as caught:
        reg.checkpoint("gone/main/step00000001")
    assert caught.value.what.startswith("evicted (not among last 1")
    assert "`holdfast undo gone main/step1` brings it back" in str(caught.value)
    run.retention.undo()
    assert reg.checkpoint("gone/main/step1").load()["optimizer"]["step"] == 1


def test_a_superseded_step_is_found_by_its_id(reg):
    run = reg.create_run("back")
    first = run.save(small_state(1), step=1)
    second = run.save(small_state(2), step=2)
    run.restore(first)
    run.save(small_state(3), step=3)
    with pytest.raises(NotFound, match="superseded") as caught:
        reg.checkpoint("back/main/step2")
    assert f"back/{second.digest.short} finds it" in str(caught.value)
    run.retention.prune(Retention(last=1))
    with pytest.raises(NotFound, match="evicted") as caught:
        reg.checkpoint("back/main/step2")
    assert f"`holdfast undo back {second.digest.short}`" in str(caught.value)


def test_of_two_evicted_at_a_step_the_one_that_counts_is_named_by_its_id(reg):
    run = reg.create_run("twice")
    first = run.save(small_state(1), step=1)
    run.save(small_state(2), step=2)
    run.restore(first)
    counts = run.save(small_state(3), step=2)
    run.restore(counts)
    run.save(small_state(4), step=3)
    run.retention.prune(Retention(last=1))
    assert len(run.retention.evicted()) == 3
    with pytest.raises(NotFound, match="evicted") as caught:
        reg.checkpoint("twice/main/step2")
    assert f"`holdfast undo twice {counts.digest.short}`" in str(caught.value)
    run.retention.undo(*(one for one in run.retention.evicted() if one.digest == counts.digest))
    assert reg.checkpoint("twice/main/step2").digest == counts.digest
