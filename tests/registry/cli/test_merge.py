"""`merge`: what people and programs are shown, and what the command line refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import holdfast
from tests.registry.cli.calling import RECORD, Call, CallJson

ONE, TWO = "demo/main/step10", "demo/phase2/step20"


def weights(url: str, ref: str) -> np.ndarray:
    with holdfast.open(url) as opened:
        found: np.ndarray = opened.checkpoint(ref).load()["model"]["w"]
        return found


def test_merge(call: Call, url: str) -> None:
    options = ("--into", "demo", "--step", 30, "--pick", f"epoch={TWO}", "--metric", "loss=0.125")
    made = call("merge", ONE, TWO, *options)
    assert made.stdout.startswith("merged: demo/phase2/step00000030  ")
    assert made.stdout.endswith("  2.3 KiB\n")
    assert (
        call("run", "ls").stdout.splitlines()[1].startswith("demo  running  ")
    )  # it has a trainer
    assert call("merge", ONE, TWO, *options).stdout.startswith("there already: demo/phase2/step")
    assert (weights(url, "demo/latest") == np.arange(600, dtype="f4") + np.float32(0.5)).all()
    shown = call("show", "demo/latest").stdout
    lines = dict(line.split(None, 1) for line in shown.splitlines() if line.startswith("meta."))
    assert lines == {
        "meta.merge.sources": "demo/main/step00000010 (weight 0.5), "
        "demo/phase2/step00000020 (weight 0.5)",
        "meta.merge.pick": "epoch from demo/phase2/step00000020",
    }
    assert "loss=0.125" in shown


def test_merge_with_weights_into_a_new_run(call: Call, call_json: CallJson, url: str) -> None:
    options = ("--into", "soup", "--step", 1, "--create", "--pick", f"epoch={ONE}")
    weighted = ("--weight", f"{TWO}=0.25", "--weight", f"{ONE}=0.75")
    made = call_json("merge", ONE, TWO, *options, *weighted, "--average", "model/*")
    assert set(made) >= RECORD | {"new"}
    assert made["new"] is True
    assert made["meta"]["merge"]["weights"] == [0.75, 0.25]
    assert made["meta"]["merge"]["average"] == ["model/*"]
    sources = ["demo/main/step00000010", "demo/phase2/step00000020"]
    assert made["meta"]["merge"]["sources"] == [
        {"ref": ref, "id": call_json("show", ref)["id"]} for ref in sources
    ]
    weighted_sources = f"{sources[0]} (weight 0.75), {sources[1]} (weight 0.25)"
    shown = call("show", "soup/latest").stdout.splitlines()
    assert f"meta.merge.sources  {weighted_sources}" in shown
    assert "meta.merge.average  model/*" in shown
    assert weights(url, "soup")[0] == 0.25
    assert call_json("run", "show", "soup")["merged_from"] == weighted_sources.split(", ")
    assert f"merged_from  {weighted_sources}" in call("run", "show", "soup").stdout
    assert f"merged from {weighted_sources}" in call("log", "soup").stdout
    # Nobody trains it: it is no run that is running.
    status = ("run", "ls", "--columns", "run,status")
    assert call(*status).stdout.split()[2:] == ["demo", "running", "soup", "merged"]
    assert "status       merged\n" in call("run", "show", "soup").stdout
    assert [one["run"] for one in call_json("run", "ls", "--where", "status=merged")] == ["soup"]
    call("run", "set", "soup", "--status", "failed")
    assert call(*status).stdout.split()[-1] == "failed"
    with holdfast.open(url) as opened:
        run = opened.run("soup")
        run.restore()
        run.save({"model": {"w": np.zeros(600, "f4")}, "epoch": 3}, step=2)
    assert call(*status).stdout.split()[-1] == "running"
    call("run", "create", "fork", "--from", "soup/main/step1")
    assert "fork  forked" in call("run", "ls").stdout


@pytest.mark.parametrize(
    "said",
    [
        "of old",
        {"sources": 3},
        {"sources": [{"ref": "a"}], "weights": [1, 2]},
        {"sources": [], "pick": [1]},
        {"sources": [{"ref": 7}]},
    ],
)
def test_a_meta_that_only_has_the_name_is_shown_as_it_is(said: Any, call: Call, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.run("demo").save({"x": 1}, step=30, phase=2, meta={"merge": said, "note": "hi"})
    lines = call("show", "demo/latest").stdout.splitlines()
    assert [line.split(None, 1) for line in lines if line.startswith("meta.")] == [
        ["meta.merge", str(said)],
        ["meta.note", "hi"],
    ]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 3, "epoch is 1 and 2"),
        (("--pick", f"epoch={ONE}", "--average", "epoch"), 3, "neither averaged nor picked"),
        (("--pick", f"epoc={ONE}"), 4, "Did you mean 'epoch'"),
        (("--pick", "epoch"), 2, "NAME=VALUE"),
        (("--pick", f"epoch={ONE}", "--pick", f"epoch={TWO}"), 2, "given twice"),
        (("--weight", f"{ONE}=1"), 2, f"no --weight for {TWO}"),
        (("--weight", f"{ONE}=much"), 2, "not a number"),
        (("--weight", "demo=1"), 2, "one for each of"),
        (("--weight", f"{ONE}=1", "--weight", f"{TWO}=1"), 3, "0.5, 0.5"),
    ],
)
def test_what_merge_refuses(options: tuple[str, ...], status: int, said: str, call: Call) -> None:
    before = call("log", "demo").stdout
    result = call("merge", ONE, TWO, "--into", "demo", "--step", 30, *options, status=status)
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert call("log", "demo").stdout == before
    assert call("merge", "demo/tags/x", "--into", "demo", "--step", 30, status=4)
    assert call("merge", ONE, "--into", "dmo", "--step", 30, status=4)
