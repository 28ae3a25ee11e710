"""Every command, through the front door."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.registry import formats
from holdfast.registry.spec import RunSpec
from tests.registry.cli.calling import Call, CallJson
from tests.support.commands import invoke


def test_init(call: Call, tmp_path: Path) -> None:
    result = call("init", tmp_path / "new")
    assert result.stdout.startswith(f"made: file://{tmp_path}/new  ")
    assert "cannot prove" in result.stdout
    assert "skipped" in call("init", tmp_path / "other", "--skip-race-probe").stderr


def test_doctor(call: Call, url: str) -> None:
    lines = call("doctor").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"ok", "warn"}  # made without the probe
    for name in ("versions", "distributed", "file system", "list", "registry", "clock", "race"):
        assert any(line[6:].startswith(name) for line in lines), name
    assert call("verify").stdout.startswith("ok: 1 run")


def test_doctor_where_there_is_nothing(call: Call, tmp_path: Path) -> None:
    result = call("doctor", "-r", tmp_path / "absent", status=8)
    assert "no such folder" in result.stdout
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    assert "holdfast init" in call("doctor", "-r", tmp_path / "empty", status=8).stdout


def test_doctor_finds_links(call: Call, url: str, tmp_path: Path) -> None:
    shutil.move(f"{url}/packs", tmp_path / "packs")
    Path(url, "packs").symlink_to(tmp_path / "packs")
    lines = call("doctor", status=8).stdout.splitlines()
    assert any(line.startswith("fail  links ") for line in lines)
    assert "symbolic link" in call("gc", "--grace", "0", status=8).stderr


def test_doctor_tells_a_rank_that_may_not_save(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert "rank 3 of 8: only rank 0 may save" in call("doctor").stdout


def cache_line(printed: str) -> str:
    return next(line for line in printed.splitlines() if line[6:].startswith("cache "))


def test_doctor_finds_a_bound_of_the_cache_with_which_no_bucket_is_opened(
    call: Call, s3_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = s3_url()
    call("init", bucket, "--skip-race-probe")
    assert not any(line[6:].startswith("cache ") for line in call("doctor").stdout.splitlines())
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", "abc")
    call("ls", "-r", bucket, status=3)
    found = cache_line(call("doctor", "-r", bucket, status=8).stdout)
    assert found.startswith("fail")
    assert "HOLDFAST_CACHE_BYTES" in found
    # Those in folders are opened without a cache.
    call("ls")
    assert cache_line(call("doctor").stdout).startswith("warn")
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", "1048576")
    assert cache_line(call("doctor", "-r", bucket).stdout).endswith("cache may hold 1.0 MiB")
    assert not (tmp_path / "cache").exists()


def test_doctor_tries_the_folder_of_the_cache(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for where in ("file", "file/below", "link"):
        monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / where))
        found = cache_line(call("doctor").stdout)
        assert found.startswith("warn")
        assert str(tmp_path / where) in found
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    assert cache_line(call("doctor").stdout).startswith("ok")
    assert not list((tmp_path / "cache").iterdir())


def test_run_create(call: Call, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("lr = 0.5\n[model]\nd = 3\n")
    options = ["--seed", "0x2a", "--config", tmp_path / "c.toml", "--monitor", "acc:max"]
    assert call("run", "create", "new", *options).stdout == "new\n"
    shown = call("run", "show", "new").stdout
    assert "0x000000000000002a" in shown
    assert "acc:max" in shown
    assert "0.5" in shown
    assert call("run", "create", "--seed", 1).stdout.endswith("_00000001\n")


@pytest.mark.parametrize("text", ["acc", "acc:most", ":min"])
def test_run_create_refuses_a_bad_monitor(text: str, call: Call) -> None:
    assert "METRIC:min" in call("run", "create", "--monitor", text, status=2).stderr


@pytest.mark.parametrize("text", ["{", '{"lr": 1, "lr": 2}'])
def test_run_create_refuses_a_bad_configuration(text: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    result = call("run", "create", "new", "--config", tmp_path / "c.json", status=3)
    assert "configuration cannot be read" in result.stderr
    assert "new" not in call("run", "ls").stdout


def test_run_create_keeps_no_best_without_a_monitor(call: Call) -> None:
    refused = call("run", "create", "new", "--best", 1, status=3).stderr
    assert "--best 1: the best are to be kept, and no metric says which" in refused
    assert "hint: Add --monitor loss:min" in refused
    call("run", "create", "new", "--best", 1, "--monitor", "loss:min")
    call("run", "create", "other", "--best", 1, "--preset", "default")


def test_run_ls_and_show(call: Call) -> None:
    listed = call("run", "ls").stdout.splitlines()
    assert listed[0].split() == [
        *("run", "status", "phase", "checkpoints", "latest", "loss", "best_step"),
        *("heard", "age", "owner"),
    ]
    assert listed[1].split()[:5] == ["demo", "running", "2", "2", "phase2/step00000020"]
    shown = call("run", "show", "demo").stdout
    assert "tags\n  keeper  demo/phase2/step00000020" in shown


def test_run_ls_and_show_tell_what_is_overdue(
    call: Call, call_json: CallJson, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("night")
        with run.checkpointer(every_steps=1, every_s=600, background=False) as checkpointer:
            for step in (1, 2):
                checkpointer.step(step, {"w": step})
    assert call_json("run", "show", "night")["last_heard"]["interval_s"] == 600
    later_s = time.time() + 7200
    monkeypatch.setattr(
        "holdfast.registry.cli.run_listing.clock", SimpleNamespace(time=lambda: later_s)
    )
    assert "night  running, overdue  main" in call("run", "ls").stdout
    shown = call("run", "show", "night").stdout
    assert "overdue: it saved about every 10 min" in shown
    assert "% of the time, for saves" in shown


def test_ls(call: Call) -> None:
    header, first, second = call("ls", "demo").stdout.splitlines()
    assert header.split() == ["phase", "step", "id", "size", "loss", "nan", "age", "marks"]
    assert first.split()[5:7] == ["0.5", "nan"]
    assert second.endswith("latest, best, tags/keeper")
    assert call("ls").stdout.splitlines()[1].startswith("demo  main")


def test_show(call: Call) -> None:
    shown = call("show", "demo/main/step10").stdout
    assert "meta.note  hi" in shown
    assert "tensor " not in shown
    assert "model/w  float32  [600]  2.3 KiB" in call("show", "demo", "--tensors").stdout


def test_show_says_how_to_get_it(
    call: Call, call_json: Callable[..., Any], url: str, tmp_path: Path
) -> None:
    found = call_json("show", "demo/main/step10")
    shown = call("show", "demo/main/step10").stdout
    assert shown.endswith(f"\n\n{found['pull']}\n\n{found['load']}\n")
    names: dict[str, Any] = {}
    exec(found["load"], names)
    assert names["state"]["epoch"] == 1
    command, *words = shlex.split(found["pull"].replace("\\\n", ""))
    words[words.index("--to") + 1] = str(tmp_path / "got.zarr")
    assert (command, "got.zarr" in call(*words).stdout) == ("holdfast", True)


def test_what_is_held_back_is_marked(call: Call, call_json: Callable[..., Any], url: str) -> None:
    with holdfast.open(url) as opened:
        run = opened.create_run("wild", preset=RunSpec(finite=("model/*",)))
        run.save({"model": {"w": np.array([1.0, float("nan")])}}, step=1)
    assert call("ls", "wild").stdout.splitlines()[1].endswith("  held back")
    shown = call("show", "wild/main/step1").stdout
    assert "marks      held back\nnonfinite  model/w\n" in shown
    (listed,) = call_json("ls", "wild")
    assert (listed["marks"], listed["nonfinite"]) == (["held back"], ["model/w"])


def test_log(call: Call) -> None:
    header, *lines = call("log", "demo").stdout.splitlines()
    assert header.split() == ["n", "time", "author", "what"]
    assert [line.split()[0] for line in lines] == ["3", "2", "1", "0"]
    assert "tag keeper at phase2/step00000020" in lines[0]
    assert "begin the run" in lines[-1]
    assert len(call("log", "demo", "-n", 1).stdout.splitlines()) == 2


def test_diff(call: Call) -> None:
    result = call("diff", "demo/main/step10", "demo/tags/keeper").stdout
    assert "~ model/w  2.3 KiB" in result
    assert "~ epoch: 1 -> 2" in result
    assert result.splitlines()[-3:-1] == ["metric  before  after", "loss       0.5   0.25"]
    assert call("diff", "demo", "demo/best").stdout.startswith("the same state")


def test_diff_of_files_says_what_compares_them(call: Call, torch_file: Path) -> None:
    refused = call("diff", "demo", torch_file, status=3).stderr
    assert "a file, not a checkpoint" in refused
    assert f"holdfast attest {torch_file} REF" in refused


def test_a_torch_file_that_was_cut_off_says_so(call: Call, torch_file: Path) -> None:
    torch_file.write_bytes(torch_file.read_bytes()[:-30])
    refused = call("push", torch_file, "demo", "--step", 40, status=3).stderr
    assert "found no end: it was cut off" in refused


def test_attest(call: Call, tmp_path: Path) -> None:
    call("pull", "demo/main/step10", "--only", "model", "--to", tmp_path / "m.npz")
    result = call("attest", tmp_path / "m.npz", "demo/main/step10")
    assert result.stdout.splitlines()[1:] == ["1 tensor equal", "not in the file: epoch"]
    assert result.stdout.startswith("whole: demo/main/step00000010  ")
    assert call("attest", tmp_path / "m.npz").stdout.startswith("whole: demo/main/step00000010  ")
    other = call("attest", tmp_path / "m.npz", "demo", status=1)
    assert other.stdout.splitlines()[1:] == [
        *("1 tensor changed: model/w", "not in the file: epoch"),
    ]
    np.savez(tmp_path / "other.npz", w=np.zeros(3))
    none = call("attest", tmp_path / "other.npz", "--most", 1, status=1)
    assert none.stdout == "not whole: no state that was looked at\n"
    assert none.stderr == "not looked at: 1 state, and 0 runs not opened\n"


def test_metric_and_tag(call: Call) -> None:
    assert "acc=0.75" in call("metric", "add", "demo/main/step10", "loss=0.1", "acc=0.75").stdout
    assert call("ls", "demo").stdout.splitlines()[1].endswith("best")
    call("tag", "set", "demo/best", "keeper")
    assert call("show", "demo/tags/keeper").stdout.startswith("ref        demo/main/step00000010")
    assert call("tag", "rm", "demo/tags/keeper").stdout == "removed: demo/tags/keeper\n"
    assert "no such tag" in call("tag", "rm", "demo/tags/keeper", status=4).stderr
    assert "expected RUN/tags/NAME" in call("tag", "rm", "demo/best", status=3).stderr


@pytest.mark.parametrize("text", ["loss", "=1", "loss=low", "loss="])
def test_metric_refuses_what_is_no_number(text: str, call: Call) -> None:
    call("metric", "add", "demo", text, status=2)


def test_push_and_pull(call: Call, torch_file: Path, tmp_path: Path) -> None:
    options = ["--step", 30, "--phase", 2, "--metric", "loss=0.125", "--meta", "note=a b=c"]
    pushed = call("push", torch_file, "demo", *options).stdout
    assert pushed.startswith("pushed: demo/phase2/step00000030  ")
    assert "loss=0.125" in call("show", "demo").stdout
    assert "a b=c" in call("show", "demo").stdout
    again = call("push", torch_file, "demo", *options)
    assert again.stdout.startswith("there already: ")
    assert "left as they are" in again.stderr
    call("pull", "demo", "--to", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(
        found["model"]["weight"], torch.load(torch_file, weights_only=True)["model"]["weight"]
    )
    call("pull", "demo", "--to", tmp_path / "out.safetensors", "--only", "model")
    assert (
        "--only model" in call("pull", "demo", "--to", tmp_path / "x.safetensors", status=3).stderr
    )


def test_push_without_a_phase_goes_where_the_run_is(
    call: Call, url: str, torch_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "two.toml").write_text("phases = [{ name = 'warm' }, { name = 'fine' }]")
    call("run", "create", "two", "--preset", tmp_path / "two.toml")
    assert "two/warm/step00000001" in call("push", torch_file, "two", "--step", 1).stdout
    with holdfast.open(url) as opened:
        opened.run("two").exchange.push({"w": 1}, step=2, phase="fine")
    assert "two/fine/step00000003" in call("push", torch_file, "two", "--step", 3).stdout
    assert (
        "new/main/step00000001" in call("push", torch_file, "new", "--step", 1, "--create").stdout
    )


def test_push_to_a_run_that_is_not_there(call: Call, torch_file: Path) -> None:
    assert "'demo'" in call("push", torch_file, "demoo", "--step", 1, status=4).stderr
    assert call("run", "ls").stdout.count("demoo") == 0
    call("push", torch_file, "demoo", "--step", 1, "--create")


def test_the_run_may_come_from_the_environment(
    call: Call, torch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUN", "demo")
    call("push", torch_file, "--step", 40)
    assert "step00000040" in call("run", "show").stdout


@pytest.mark.parametrize("name", ["x.pkl", "x.h5", "x.joblib"])
def test_an_opaque_file_comes_back_byte_for_byte(name: str, call: Call, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / name).write_bytes(data)
    pushed = call("push", tmp_path / name, "demo", "--step", 50).stdout
    assert "stored as an opaque file; nothing in it was read" in pushed
    assert f"file     {name} (opaque" in call("show", "demo").stdout
    call("pull", "demo", "--to", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_pull_never_overwrites_unasked(call: Call, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"precious")
    arguments = ["pull", "demo", "--only", "model", "--to", tmp_path / "x.safetensors"]
    assert "--force" in call(*arguments, status=3).stderr
    assert (tmp_path / "x.safetensors").read_bytes() == b"precious"
    call(*arguments, "--force")
    assert (tmp_path / "x.safetensors").read_bytes() != b"precious"


def test_pull_to_a_format_that_is_not_there(call: Call, tmp_path: Path) -> None:
    result = call("pull", "demo", "--to", tmp_path / "x.h5", status=3)
    assert "cannot be written as .h5" in result.stderr
    assert ".safetensors" in result.stderr


def test_pull_writes_to_no_pipe(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not to a pipe" in call("pull", "demo", "--to", "-", status=3).stderr
    assert not (tmp_path / "-").exists()


def test_sync(call: Call, url: str, tmp_path: Path) -> None:
    holdfast.init(tmp_path / "mirror", skip_race_probe=True).close()
    first = call("sync", url, tmp_path / "mirror", "demo").stdout.splitlines()
    assert first[1].split()[0] == "demo"
    assert first[1].split()[2] == "2"
    assert first[-1].startswith("1 run copied, 0 up to date before")
    assert first[-1].endswith(" of packs sent")
    again = call("sync", url, tmp_path / "mirror").stdout
    assert "manifests" not in again
    with holdfast.open(url) as opened:
        opened.create_run("tiny").save({"epoch": 1}, step=1)
    tiny = call("sync", url, tmp_path / "mirror", "tiny").stdout
    assert tiny.endswith("; 0 B of packs sent (small states travel in manifests)\n")
    assert "0 runs copied, 1 up to date before; 0 B" in again
    assert "keeper" in call("ls", "demo", "-r", tmp_path / "mirror").stdout
    assert "'demo'" in call("sync", url, tmp_path / "mirror", "dem", status=4).stderr
    call("sync", url, url, status=3)


def test_version_and_help(call: Call) -> None:
    assert call("--version").stdout.startswith("holdfast ")
    shown = call("--help").stdout
    for name in ("init", "doctor", "push", "pull", "ls", "show", "log", "diff", "verify", "sync"):
        assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("arguments", "status", "near"),
    [
        (["pusj"], 2, "'push'"),
        (["run", "shwo", "demo"], 2, "'show'"),
        (["ls", "--jsn"], 2, "--json"),
        (["run", "show", "dmeo"], 4, "'demo'"),
        (["show", "demo/phase3/latest"], 4, "'phase2'"),
        (["show", "demo/tags/keepr"], 4, "'keeper'"),
    ],
)
def test_near_names(arguments: list[str], status: int, near: str, call: Call) -> None:
    assert near in call(*arguments, status=status).stderr


def test_init_by_option_or_environment(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("init", "-r", tmp_path / "one", "--skip-race-probe")
    monkeypatch.setenv("HOLDFAST_REGISTRY", str(tmp_path / "two"))
    call("init", "--skip-race-probe")
    monkeypatch.delenv("HOLDFAST_REGISTRY")
    assert "HOLDFAST_REGISTRY" in call("init", status=2).stderr


def test_a_bucket(s3_url: Callable[[], str], call: Call, torch_file: Path, tmp_path: Path) -> None:
    url = s3_url()
    call("init", url, "--skip-race-probe")
    lines = call("doctor", "-r", url).stdout.splitlines()
    assert any(line.startswith("ok    clock ") for line in lines)
    call("push", torch_file, "new", "--step", 1, "--create", "-r", url)
    call("pull", "new", "--to", tmp_path / "out.pt", "-r", url)
    call("verify", "--deep", "-r", url)
    assert "no such bucket" not in call("ls", "-r", url).output


def test_the_content_tells_the_format_unless_it_is_named(
    call: Call, torch_file: Path, tmp_path: Path, call_json: Callable[..., Any]
) -> None:
    weights = torch_file.rename(tmp_path / "pytorch_model.bin")
    unread = call_json("push", weights, "demo", "--step", 40, "--format", "opaque")
    assert unread["format"] == "opaque"
    pushed = call_json("push", weights, "demo", "--step", 41)
    assert pushed["format"] == "torch"
    added = call_json("push", weights, "demo", "--artifact", "weights", "--format", "torch")
    assert added["id"] == pushed["id"]
    assert (
        "no such format"
        in call("push", weights, "demo", "--step", 42, "--format", "tar", status=3).stderr
    )
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    formats.write(folder / "model.safetensors", {"model": {"w": torch.ones(3)}})
    unread = call("push", folder, "demo", "--step", 42, "--format", "tree").stdout
    assert "stored as a folder of files; nothing in them was read" in unread
    assert call_json("push", folder, "demo", "--step", 43)["format"] == "hf"
    call("pull", "demo", "--to", tmp_path / "back", "--format", "hf")
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_gc_forgets_a_run_when_it_is_told_twice(call: Call, call_json: CallJson, url: str) -> None:
    junk = Path(url, "runs/demo/log/junk")
    junk.write_bytes(b"")
    assert "holdfast gc --forget 'demo'" in call("gc", status=6).stderr
    dry = call("gc", "--forget", "demo", "--dry-run", "--grace", "0").stdout
    assert "would forget  demo" in dry
    refused = call("gc", "--forget", "demo", status=2).stderr
    assert "give --yes to forget the run" in refused
    found = call_json("gc", "--forget", "demo", "--yes", "--grace", "0")
    assert found["forgotten"] == ["demo"]
    assert found["deleted"]["objects"] > 0
    assert call_json("gc", "--grace", "0")["forgotten"] == []
    assert call("gc", "--forget", "none", "--yes", status=4)


def test_gc_accepts_a_log_that_a_mirror_put_back_when_it_is_told_twice(
    call: Call, call_json: CallJson, url: str, tmp_path: Path
) -> None:
    mirror = str(tmp_path / "mirror")
    holdfast.init(mirror, skip_race_probe=True).close()
    call("sync", url, mirror)
    call("tag", "set", "demo/latest", "later")
    call("gc")
    shutil.rmtree(Path(url, "runs/demo"))
    call("trust")
    call("sync", mirror, url, "demo")
    assert "holdfast gc --accept 'demo'" in call("gc", status=6).stderr
    assert "would accept  demo" in call("gc", "--accept", "demo", "--dry-run").stdout
    assert "give --yes to accept the run" in call("gc", "--accept", "demo", status=2).stderr
    assert call_json("gc", "--accept", "demo", "--yes")["accepted"] == ["demo"]
    assert call_json("gc")["accepted"] == []
    assert call("gc", "--accept", "none", "--yes", status=4)


def test_an_upgrade_asks_first_and_says_what_it_raised(call: Call, call_json: CallJson) -> None:
    assert "--yes" in call("upgrade", status=2).stderr
    assert call_json("upgrade", "--yes") == {
        "min_writer": 4,
        "raised": True,
        "epoch": 1,
        "runs": 1,
        "marked": 1,
    }
    assert (
        "least writer version 4, by epoch 1; 0 of 1 run marked" in call("upgrade", "--yes").stdout
    )


def test_a_freeze_asks_first_and_says_where_it_moved(call: Call, call_json: CallJson) -> None:
    assert "--yes" in call("freeze", status=2).stderr
    there = "s3://new-bucket/team"
    frozen = {"moved_to": there, "epoch": 1, "runs": 1, "marked": 1}
    assert call_json("freeze", "--moved-to", there, "--yes") == frozen
    refused = call("tag", "set", "demo/best", "x", status=5).stderr
    assert f"Name it with -r '{there}'" in refused
    assert "frozen by epoch 1" in call("doctor").stdout
    assert "not frozen, by epoch 2; 1 of 1 run marked" in call("freeze", "--off").stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("{tmp}/acme vault/Zebra Döner", []),
        ("{tmp}/acme-absent", []),
        ("s3://acme-bucket/team-zebra", ["--storage-option", "endpoint_url=http://127.0.0.1:9"]),
        ("s3://acme-bucket/zebra", ["--storage-option", "profile=acme-admin"]),
    ],
)
def test_a_public_report_of_doctor_names_nothing_of_the_user(
    call: Call,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    options: list[str],
    form: list[str],
) -> None:
    shutil.copytree(url, tmp_path / "acme vault" / "Zebra Döner")
    hostile = {
        "HOLDFAST_RUN": "zebra run, x=acme",
        "HOLDFAST_CACHE": str(tmp_path / "acme vault"),
        "AWS_PROFILE": "acme",
        "AWS_ENDPOINT_URL": "http://zebra:hushhush@acme.example/?sig=hushhush",
        "AWS_REGION": "zebra\x1b[31m",
        "RANK": "zebra",
        "WORLD_SIZE": "acme",
        "HOLDFAST_S3_TIMEOUT": "1",
    }
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    words = ["doctor", "--public", *form, *options, "-r", place.format(tmp=tmp_path)]
    result = invoke(*words)
    assert result.exit_code in (0, 8), result.output
    assert "***" in result.output
    assert not re.search(
        r"acme|zebra|vault|Döner|hush|127\.0\.0\.1|\x1b|team|/tmp|/dev/shm", result.output, re.I
    )
    assert "fail" in result.output or "registry" in result.output
