"""`du`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import holdfast
from holdfast import Retention, RunSpec
from tests.registry.cli.calling import Call, CallJson

SUMS = {
    *("own_bytes", "shared_bytes", "dead_bytes", "unneeded_bytes", "table_bytes"),
    *("log_bytes", "other_bytes"),
}


def test_json_adds_up(call_json: CallJson, url: str) -> None:
    found = call_json("du")
    assert set(found) == SUMS | {"total_bytes", "runs", "damaged"}
    files = [path for path in Path(url).rglob("*") if path.is_file() and ".tmp" not in path.parts]
    on_disk = sum(path.stat().st_size for path in files)
    assert sum(found[name] for name in SUMS) == found["total_bytes"] == on_disk
    (run,) = found["runs"]
    assert set(run) == {
        *("run", "hidden", "own_bytes", "shared_bytes", "freed_bytes", "log_bytes", "states")
    }
    first, second = run["states"]
    assert set(first) == {"ref", "id", "own_bytes", "shared_bytes", "freed_bytes"}
    assert first["id"].startswith("sha256:")
    assert first["ref"] == "demo/main/step00000010"
    assert first["freed_bytes"] == first["own_bytes"] > 2400
    assert second["freed_bytes"] == 0  # tagged
    assert run["freed_bytes"] == run["own_bytes"] == first["own_bytes"] + second["own_bytes"]


def test_runs_are_told(call: Call) -> None:
    call("run", "create", "empty")
    head, demo, empty, blank, *sums = call("du").stdout.splitlines()
    assert head.split() == ["run", "states", "own", "shared", "freed"]
    assert demo.split()[:2] == ["demo", "2"]
    assert empty.split() == ["empty", "0", "0", "B", "0", "B", "0", "B"]
    assert blank == ""
    assert [one.split()[0] for one in sums] == [
        *("needed", "dead", "tables", "logs", "other", "total")
    ]
    assert sums[1].split(maxsplit=1)[1] == "0 B"


def test_the_states_of_a_run_are_told(call: Call) -> None:
    lines = call("du", "demo").stdout.splitlines()
    assert lines[0].split() == ["state", "own", "shared", "freed"]
    assert lines[1].split()[0] == "demo/main/step00000010"
    assert lines[2].split()[-2:] == ["0", "B"]


def test_what_is_dead_is_told_and_what_a_hidden_run_holds(call: Call, url: str) -> None:
    call("run", "rm", "demo", "--reason", "over", "--yes")
    needed, dead, *_ = call("du").stdout.splitlines()[-6:]
    assert needed.endswith("; dropped runs hold 5.6 KiB until gc frees them (holdfast drops)")
    assert dead == "dead    0 B"
    call("run", "rm", "demo", "--reason", "over", "--yes", "--now")
    needed, dead, *_ = call("du").stdout.splitlines()[-6:]
    assert "dropped" not in needed
    assert dead.endswith("for gc")


def test_old_snapshots_are_told(call: Call, url: str) -> None:
    with holdfast.open(url) as reg:
        run = reg.run("demo", create=True)
        for number in range(24):
            run.pins.tags.set("t", run.checkpoints()[number % 2])
    used = call("du").stdout
    (stale,) = (line for line in call("gc", "--dry-run").stdout.splitlines() if "stale" in line)
    assert stale.endswith(": old snapshots of logs, and probes")
    size = stale.partition(", ")[2].partition(":")[0]
    assert f"dead    {size} for gc" in used
    assert stale in call("gc").stdout
    assert "stale" not in call("gc").stdout


def test_no_such_run(call: Call) -> None:
    assert "Did you mean 'demo'?" in call("du", "dem", status=4).stderr


def test_what_can_be_deleted_and_by_which_command(
    call: Call, call_json: CallJson, url: str
) -> None:
    def save(run: holdfast.Run, steps: int) -> None:
        for step in range(1, steps + 1):
            state = {"w": np.random.default_rng([step, *run.id.encode()]).random(1000)}
            run.save(state, step=step)

    with holdfast.open(url) as reg:
        save(reg.create_run("old"), 4)
        save(reg.create_run("strict", preset=RunSpec(retention=Retention(last=2))), 2)
        for name in ("gone", "bad", "pinned"):
            save(reg.create_run(name), 2)
        reg.run("pinned").pins.tags.set("keep", reg.run("pinned").latest())
        for name in ("bad", "pinned"):
            reg.run(name).status = "failed"
    call("run", "rm", "gone", "--reason", "over", "--yes")
    ways = {one["what"]: one for one in call_json("du", "--free")}
    sizes = {one["run"]: one for one in call_json("du")["runs"]}
    older = ways.pop("older checkpoints of runs without a policy")
    each = 'for run in old pinned; do holdfast prune "$run" --last 1; done'
    assert older["command"] == each
    assert older["runs"] == ["old", "pinned"]  # of `demo` one is the newest, one the best
    assert older["states"] == 4
    states = {one["ref"]: one["own_bytes"] for run in sizes.values() for one in run["states"]}
    going = [f"old/main/step{step:08}" for step in (1, 2, 3)]
    going += ["pinned/main/step00000001"]
    assert older["freed_bytes"] == sum(states[ref] for ref in going)
    told = {one["command"]: (one["runs"], one["freed_bytes"]) for one in ways.values()}
    assert told == {
        "holdfast gc": (["gone"], sizes["gone"]["own_bytes"]),
        "holdfast run rm bad --reason failed": (["bad"], sizes["bad"]["own_bytes"]),
    }
    call("prune", "old", "--last", "1")
    last = call("du", "--free").stdout.splitlines()
    assert last[0].split() == ["what", "runs", "states", "freed", "command"]
    (dead,) = (
        line for line in last if line.startswith("objects that nothing needs, after the grace")
    )
    assert dead.endswith("holdfast gc")
    assert "whole registry" in call("du", "demo", "--free", status=2).stderr


def test_while_a_run_is_damaged_only_what_can_be_done_is_told(
    call: Call, call_json: CallJson, url: str
) -> None:
    with holdfast.open(url) as reg:
        for name in ("bad", "old"):
            run = reg.create_run(name)
            for step in (1, 2):
                run.save({"w": np.full(1000, step + len(name))}, step=step)
    for slot in (Path(url) / "runs/bad/log").iterdir():
        slot.write_bytes(b"{")
    (way,) = call_json("du", "--free", status=6)
    assert (way["runs"], way["command"]) == (["old"], "holdfast prune old --last 1")


def test_what_a_policy_would_evict_can_be_deleted(call_json: CallJson, url: str) -> None:
    with holdfast.open(url) as reg:
        run = reg.create_run("strict", preset=RunSpec(retention=Retention(last=1)))
        first = run.save({"w": np.arange(1000.0)}, step=1)
        run.pins.tags.set("keep", first)
        run.save({"w": np.arange(1000.0) + 1}, step=2)
        run.pins.tags.remove("keep")
    (way,) = (one for one in call_json("du", "--free") if one["command"] == "holdfast prune '*'")
    assert (way["runs"], way["states"]) == (["strict"], 1)
    assert way["freed_bytes"] > 1000
