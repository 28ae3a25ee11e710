"""`bisect`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.spec import RunSpec
from tests.registry.cli.calling import Call, CallJson

ENDS = ("--good", "long/main/step1", "--bad", "long/main/step8")
#: Bad from step 5 on: the exit status is 7 from there.
STATUS = "import os; n = int(os.environ['HOLDFAST_STEP']); raise SystemExit(7 if n > 4 else 0)"


@pytest.fixture
def long(url: str) -> str:
    """A run of eight checkpoints; from step 5 on the loss is high and a weight is not finite."""
    with holdfast.open(url) as opened:
        run = opened.create_run("long", seed=1, preset=RunSpec(finite=("model/*",)))
        for step in range(1, 9):
            w = np.full(4, np.nan if step > 4 else 1.0)
            state = {"model": {"w": w, "fixed": np.zeros(9)}}
            metrics = {} if step == 6 else {"loss": float("nan") if step == 7 else step / 2}
            run.save(state, step=step, metrics=metrics)
    return url


def ref(step: int) -> str:
    return f"long/main/step{step:08d}"


def test_a_command_decides(call: Call, long: str, tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'said')!r}, 'a').write(os.sys.argv[1] + ' ')"
    words = (sys.executable, "-c", f"import os; {script}; {STATUS}", "{step}:{ref}:{{ref}}")
    result = call("bisect", "long", *ENDS, "--", *words)
    assert result.stdout.splitlines() == [
        "6 checkpoints between them, about 3 steps",
        f"good     {ref(4)}  exit status 0",
        f"bad      {ref(6)}  exit status 7",
        f"bad      {ref(5)}  exit status 7",
        "",
        *result.stdout.splitlines()[5:7],
        "",
        "is       tensor   size",
        "changed  model/w  32 B",
    ]
    good, bad = result.stdout.splitlines()[5:7]
    assert good.startswith(f"last good  {ref(4)}  ")
    assert bad.startswith(f"first bad  {ref(5)}  ")
    assert (tmp_path / "said").read_text().split() == [
        f"{step}:{ref(step)}:{{ref}}" for step in (4, 6, 5)
    ]


def test_json(call: Call, long: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = (sys.executable, "-c", f"print('chatter', flush=True); {STATUS}")
    found = json.loads(call("bisect", "long", *ENDS, "--json", "--", *words).stdout)
    said = capfd.readouterr()
    assert ("chatter" in said.out, "chatter" in said.err) == (False, True)
    assert set(found) == {"run", "good", "bad", "first_bad", "undecided", "steps", "changed"}
    assert found["good"]["ref"] == ref(4)
    assert found["bad"] == found["first_bad"]
    assert found["bad"]["ref"] == ref(5)
    assert found["undecided"] == []
    assert [(step["ref"], step["verdict"]) for step in found["steps"]] == [
        *((ref(4), "good"), (ref(6), "bad"), (ref(5), "bad"))
    ]
    assert set(found["steps"][0]) == {"ref", "id", "verdict", "why"}
    (changed,) = found["changed"]
    assert (changed["kind"], changed["path"]) == ("changed", "model/w")


@pytest.mark.parametrize("condition", ["loss>2", "loss >= 2.5", "loss!=0.5"])
def test_a_metric_decides_and_where_it_is_missing_nothing_does(
    call_json: CallJson, long: str, condition: str
) -> None:
    found = call_json("bisect", "long", *ENDS, "--metric", condition)
    first = 2 if condition == "loss!=0.5" else 5
    assert found["first_bad"]["ref"] == ref(first)
    found = call_json("bisect", "long", *ENDS, "--metric", "loss>2.6")
    assert found["first_bad"] is None
    assert (found["good"]["ref"], found["bad"]["ref"]) == (ref(5), ref(7))  # NaN is bad
    assert [one["ref"] for one in found["undecided"]] == [ref(6)]
    assert {step["why"] for step in found["steps"]} >= {"no loss", "loss=nan"}


def test_what_cannot_be_narrowed_is_said(call: Call, long: str) -> None:
    said = call("bisect", "long", *ENDS, "--metric", "loss>2.6").stdout
    assert "cannot be narrowed further: 1 checkpoint between these two" in said
    assert f"bad        {ref(7)}" in said
    assert "first bad" not in said


def test_weights_decide(call_json: CallJson, long: str) -> None:
    found = call_json("bisect", "long", *ENDS, "--nonfinite")
    assert found["first_bad"]["ref"] == ref(5)
    assert found["steps"][-1]["why"] == "not finite: model/w"


def test_125_skips_and_more_gives_up(call: Call, call_json: CallJson, long: str) -> None:
    skips = (sys.executable, "-c", "raise SystemExit(125)")
    found = json.loads(call("bisect", "long", *ENDS, "--json", "--", *skips).stdout)
    assert (found["good"]["ref"], found["bad"]["ref"]) == (ref(1), ref(8))
    assert len(found["undecided"]) == len(found["steps"]) == 6
    bad = (sys.executable, "-c", "raise SystemExit(124)")
    assert f"first bad  {ref(2)}" in call("bisect", "long", *ENDS, "--", *bad).stdout
    for end in ("raise SystemExit(126)", "import os; os.kill(os.getpid(), 9)"):
        result = call("bisect", "long", *ENDS, "--", sys.executable, "-c", end, status=1)
        assert "the command gave up" in result.stderr
        assert ref(4) in result.stderr


def test_what_is_evicted_meanwhile_is_skipped(call: Call, long: str, tmp_path: Path) -> None:
    """The first test lets go of all but two of the rest."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, holdfast\n"
        "from holdfast.registry.spec import Retention\n"
        f"with holdfast.open({long!r}) as opened:\n"
        "    run = opened.run('long')\n"
        "    run.retention.prune(Retention(last=3))\n"
        f"{STATUS}\n"
    )
    words = (sys.executable, script, "{ref}")
    said = call("bisect", "long", *ENDS, "--", *words).stdout.splitlines()
    assert said[1:][:4] == [
        f"good     {ref(4)}  exit status 0",
        f"bad      {ref(6)}  exit status 7",
        f"skipped  {ref(5)}  evicted meanwhile",
        "",
    ]


def test_the_line_of_training_decides_what_lies_between(call: Call, long: str) -> None:
    call("bisect", "long", "--good", ref(3), "--bad", ref(4), "--metric", "loss>1.6")
    with holdfast.open(long) as opened:
        run = opened.run("long")
        run.restore(at=run.checkpoints()[2])
        run.save({"model": {"w": np.ones(1)}}, step=4, metrics={"loss": 9.0})
        gone = next(one for one in run.manifest.checkpoints if one.superseded)
    said = call("bisect", "long", "--good", ref(1), "--bad", ref(4), "--metric", "loss>1.6").stdout
    assert f"first bad  {ref(4)}" in said
    name = f"long/{gone.manifest.short}"
    result = call("bisect", "long", "--good", ref(1), "--bad", name, "--nonfinite", status=3)
    assert "not a checkpoint of the run's current line" in result.stderr


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (ENDS, 2, "give one of"),
        ((*ENDS, "--nonfinite", "--metric", "loss>2"), 2, "give one of"),
        ((*ENDS, "--metric", "loss"), 2, "is not a condition"),
        ((*ENDS, "--metric", "loss>x"), 2, "is not a condition"),
        ((*ENDS, "--metric", "loss>nan"), 2, "is not a condition"),
        ((*ENDS, "--metric", "los>9"), 4, "Did you mean 'loss'"),
        ((*ENDS, "--metric", "loss>9"), 3, "this one is good by the given test"),
        ((*ENDS, "--metric", "loss>0.1"), 3, "this one is bad by the given test"),
        ((*ENDS, "--", "python", "{reff}"), 3, "no such placeholder"),
        ((*ENDS, "--", "no-such-command"), 3, "the command cannot be started"),
        (("--good", ref(8), "--bad", ref(1), "--nonfinite"), 3, "does not come after"),
        (("--good", ref(1), "--bad", "demo", "--nonfinite"), 3, "current line of training"),
    ],
)
def test_wrong_words(call: Call, long: str, words: tuple[str, ...], status: int, told: str) -> None:
    assert told in call("bisect", "long", *words, status=status).stderr


def test_a_run_that_does_not_check_its_weights_says_so(call: Call) -> None:
    ends = ("--good", "demo/main/step10", "--bad", "demo/2/step20")
    result = call("bisect", "demo", *ends, "--nonfinite", status=3)
    assert "does not check" in result.stderr
