"""`du`."""

from __future__ import annotations

from pathlib import Path

import holdfast
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
