"""`repack`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Storing
from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.spec import Retention
from tests.registry.cli.calling import Call, CallJson


@pytest.fixture
def thinned(url: str) -> str:
    """A run of five checkpoints, of which a third of the oldest pack and the newest are needed."""
    fixed = np.random.default_rng(0).bytes(100_000)
    with holdfast.open(url) as opened:
        run = opened.create_run("thin", seed=1)
        for step in range(5):
            changing = np.random.default_rng(step + 1).bytes(200_000)
            parts = {"fixed": fixed, "w": changing}
            state = {name: np.frombuffer(data, np.uint8) for name, data in parts.items()}
            run.save({"model": state}, step=step)
        run.retention.prune(Retention(last=1))
    return url


def test_it_tells_what_it_did(call: Call, thinned: str) -> None:
    dead, small, written, placed, left = call("repack").stdout.splitlines()
    assert dead == "dead in part  1 pack, 293.2 KiB, of which 97.7 KiB are needed"
    # With the two packs of the run beside it.
    assert small == "small         3 packs, 200.5 KiB, of which 200.0 KiB are needed"
    assert written == "written       2 packs, 297.7 KiB"
    assert placed == "placed again  3 states of 2 runs"
    assert left == "left to gc    493.8 KiB of old packs"
    assert call("verify", "--deep").exit_code == 0
    with holdfast.open(thinned) as opened:
        state = opened.checkpoint("thin").load()
    assert state["model"]["w"].tobytes() == np.random.default_rng(5).bytes(200_000)


def test_there_may_be_nothing_to_do(call: Call, thinned: str) -> None:
    call("repack")
    assert call("repack").stdout.startswith("nothing to gain")
    call("gc", "--grace", "0")
    assert call("repack").stdout.startswith("nothing to gain")


def test_a_dry_run_changes_nothing(call: Call, call_json: CallJson, thinned: str) -> None:
    planned = call("repack", "--dry-run").stdout
    assert "to write        2 packs, 297.7 KiB" in planned
    assert "to place again  3 states of 2 runs" in planned
    assert planned == call("repack", "--dry-run").stdout
    before = call_json("repack", "--dry-run")
    after = call_json("repack")
    assert (before.pop("dry_run"), after.pop("dry_run")) == (True, False)
    assert before == after


def test_json(call_json: CallJson, thinned: str) -> None:
    done = call_json("repack", "thin")
    assert set(done) == {
        *("dry_run", "packs_read", "packs_written", "bytes_moved", "freed_bytes", "runs"),
        *("checkpoints", "packs", "recoded_chunks", "recoded_before_bytes", "recoded_after_bytes"),
        *("bases_dropped", "bases_dropped_bytes"),
        *("packs_in_vain", "in_vain_bytes", "placed_meanwhile"),
    }
    assert done["recoded_chunks"] == done["bases_dropped"] == 0
    assert (done["packs_read"], done["packs_written"], done["runs"]) == (2, 1, ["thin"])
    assert done["bytes_moved"] == 300_000
    assert set(done["packs"][0]) == {"pack", "size_bytes", "live_bytes", "reason"}
    assert sum(pack["size_bytes"] for pack in done["packs"]) == done["freed_bytes"]
    assert {pack["reason"] for pack in done["packs"]} == {"dead", "small"}


def test_compression(call: Call, call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("plain", seed=1)
        for step in range(2):
            run.save({"model": {"w": np.arange(step, 50_000 + step)}}, step=step)
    planned = call("repack", "plain", "--compression", "zstd", "--dry-run").stdout
    told = call("repack", "plain", "--compression", "zstd").stdout
    for text in (planned, told):
        first, second, *_ = text.splitlines()
        assert first.split(maxsplit=1)[0] == "recoded"
        assert first.endswith(" 2 packs, 781.6 KiB, of which 781.2 KiB are needed")
        assert second.startswith("re-encoded")
        assert " 2 chunks, 781.2 KiB before, " in second
    assert call("repack", "plain", "--compression", "zstd").stdout.startswith("nothing to gain")
    assert call("verify", "--deep").exit_code == 0
    back = call_json("repack", "plain", "--compression", "none")
    assert (back["recoded_chunks"], back["recoded_after_bytes"]) == (2, 800_000)


def overtaken_at(monkeypatch: pytest.MonkeyPatch, url: str, prefix: str) -> None:
    """Let another repack come in before an object is put."""
    put = LocalBackend.put_if_absent

    def before(self: LocalBackend, key: str, body: Any) -> bool:
        if key.startswith(prefix):
            monkeypatch.setattr(LocalBackend, "put_if_absent", put)
            with holdfast.open(url) as other:
                assert other.repack(compression="lz4").checkpoints
        return put(self, key, body)

    monkeypatch.setattr(LocalBackend, "put_if_absent", before)


@pytest.mark.parametrize(("steps", "told"), [(1, "1 state was"), (2, "2 states were")])
def test_who_is_overtaken_is_told(
    call: Call, url: str, monkeypatch: pytest.MonkeyPatch, steps: int, told: str
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("plain", seed=1)
        for step in range(steps):
            run.save({"model": {"w": np.arange(step, 50_000 + step)}}, step=step)
    overtaken_at(monkeypatch, url, "runs/plain/log/")
    *_, written, vain, placed, left, last = call(
        "repack", "plain", "--compression", "zstd"
    ).stdout.splitlines()
    size = r"[\d.]+ K?i?B"
    assert re.fullmatch(f"written       1 pack, {size}", written)
    assert re.fullmatch(f"in vain       1 pack of these, {size}, that no state needs now", vain)
    assert placed == "placed again  0 states of 0 runs"
    assert re.fullmatch(f"left to gc    0 B of old packs, {size} written in vain", left)
    assert last == f"{told} placed by somebody else meanwhile; run it again."
    again = call("repack", "plain", "--compression", "zstd").stdout
    assert f"placed again  {steps} state" in again
    assert "meanwhile" not in again
    assert "in vain" not in again


def save_deltas(url: str) -> None:
    """Save a tensor as a base and three deltas, each of the one before."""
    with holdfast.open(url) as opened:
        run = opened.create_run("plain", seed=1)
        values = np.random.default_rng(1).normal(size=50_000)
        for step in range(4):
            values[step] = step
            run.save(
                {"model": {"w": values}},
                step=step,
                storing=Storing(compression="zstd", keyframe_every=8),
            )


def test_bases_that_nothing_needs_go(call: Call, url: str) -> None:
    save_deltas(url)
    with holdfast.open(url) as opened:
        opened.run("plain").retention.prune(Retention(last=1))
    told = call("repack", "plain").stdout
    assert "re-encoded    1 chunk, " in told
    assert "bases left    3 bases of deltas, " in told
    assert call("verify", "--deep").exit_code == 0


def test_a_chain_is_cut(call_json: CallJson, url: str) -> None:
    save_deltas(url)
    assert call_json("repack", "plain", "--keyframe-every", "2")["recoded_chunks"] == 1
    assert call_json("repack", "plain", "--keyframe-every", "1")["recoded_chunks"] == 2


_IDLE = "no pack is dead enough, and no small ones fit together"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("", ""),
        ("--compression zstd", "all chunks that are worth it are stored as zstd already; "),
        ("--compression lz4", "all chunks that are worth it are stored as lz4 already; "),
        ("--compression none", "every chunk is stored raw already; "),
        ("--keyframe-every 1", "none is stored as a delta; "),
        ("--keyframe-every 3", "no chain of deltas is longer than 3 versions; "),
        (
            "--compression lz4 --keyframe-every 1",
            "all chunks that are worth it are stored as lz4 already; none is stored as a delta; ",
        ),
        (
            "--compression zstd plain",
            "all chunks that are worth it are stored as zstd already, but for chunks in packs "
            "that other runs need too; ",
        ),
        ("plain", ""),
    ],
)
def test_nothing_to_do_is_told_by_what_was_asked(
    call: Call, url: str, asked: str, told: str
) -> None:
    """One tensor shrinks and one does not: that is stored raw whatever is asked for."""
    noise = np.random.default_rng(1).integers(0, 256, 50_000, np.uint8)
    with holdfast.open(url) as opened:
        run = opened.create_run("plain", seed=1)
        run.save({"model": {"w": np.arange(50_000), "noise": noise}}, step=1)
    call("repack", *asked.split())
    idle = f"nothing to gain: {told}{_IDLE}\n"
    assert call("repack", *asked.split()).stdout == idle
    assert call("repack", *asked.split(), "--dry-run").stdout == idle


@pytest.mark.parametrize("every", ["0", "33", "-1"])
def test_options_that_are_none_are_refused_as_for_a_new_registry(
    call: Call, every: str, tmp_path: Path
) -> None:
    fresh = str(tmp_path / "fresh")
    for wrong in (["--compression", "zst"], ["--compression", "zstd", "--keyframe-every", every]):
        told = call("repack", *wrong, status=3).stderr
        assert told == call("init", fresh, *wrong, status=3).stderr
        assert wrong[-1] in told


@pytest.mark.parametrize("every", [1, 2, 32])
def test_a_new_registry_takes_what_its_help_its_error_and_the_docs_say(
    call: Call, call_json: CallJson, every: int, tmp_path: Path
) -> None:
    told = call("init", tmp_path / "a", "--keyframe-every", "33", status=3).stderr
    docs = (Path(__file__).parents[3] / "docs/cli/start.md").read_text()
    section = docs.split("\n## init\n")[1].split("\n## ")[0]
    for text in (told, section, helped(call, "init"), helped(call, "repack")):
        assert "1 (no deltas) to 32" in text
    made = call_json("init", tmp_path / "b", "--keyframe-every", every, "--skip-race-probe")
    assert made["keyframe_every"] == every


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_a_new_registry_takes_each_compression_that_its_help_names(
    call: Call, call_json: CallJson, compression: str, tmp_path: Path
) -> None:
    expected = call("init", tmp_path / "a", "--compression", "zip", status=3).stderr
    docs = (Path(__file__).parents[3] / "docs/cli/start.md").read_text()
    section = docs.split("\n## init\n")[1].split("\n## ")[0]
    for text in (expected, section, helped(call, "init"), helped(call, "repack")):
        assert re.search(rf"\b{compression}\b", text)
    made = call_json("init", tmp_path / "b", "--compression", compression, "--skip-race-probe")
    assert made["compression"] == compression


def helped(call: Call, command: str) -> str:
    """Return what a command says of its options, in one line without frames."""
    return re.sub(r"[\s│|]+", " ", call(command, "--help").stdout)


def test_chains_may_be_as_long_as_a_reader_follows(call: Call) -> None:
    call("repack", "--keyframe-every", "32", "--dry-run")


@pytest.mark.parametrize(("share", "goes"), [("60%", True), ("0.6", True), ("70%", False)])
def test_the_share_decides(
    call_json: CallJson, thinned: str, share: str, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    from holdfast.registry.upkeep.repacking import repack_plan as repack_plan

    monkeypatch.setattr(repack_plan, "SMALL_BYTES", 0)
    assert call_json("repack", "--min-dead", share, "--dry-run")["packs_read"] == goes


@pytest.mark.parametrize("share", ["0", "101%", "2", "half", "-5%", ""])
def test_a_share_that_is_none_is_refused(call: Call, share: str) -> None:
    told = call("repack", f"--min-dead={share}", status=2).output
    assert "25% or 0.25" in told


def test_a_run_that_is_none_is_told(call: Call) -> None:
    assert "demo" in call("repack", "dmo", status=4).output
