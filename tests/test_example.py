"""The examples keep their word: of digits, a curriculum, in C with deaths, and each night."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

import holdfast
from tests.support.processes import run_apart, run_script, start_process

_EXAMPLES = Path(__file__).parents[1] / "examples"
_MAIN = _EXAMPLES / "digits" / "main.py"
#: The command, of which the first push after a start meets what the file `act` says.
_HOLDFAST = f"""#!/bin/sh
set -- {sys.executable} -m holdfast.registry.cli "$@"
if [ "$4" = push ] && [ -e act ]; then
    read -r act moment <act
    rm act
    case $act in
    before) kill -KILL $PPID; exit ;;
    within) (sleep "$moment"; kill -KILL 0) & "$@"; kill -KILL 0 ;;
    late) kill -KILL $PPID; sleep 0.5 ;;
    warned) kill -TERM $PPID ;;
    away) exit 7 ;;
    esac
fi
exec "$@"
"""


class _Trained:
    """A `Program` of the example whose process does not import torch anew."""

    def __init__(self, log: Path, name: str, *words: str) -> None:
        self.log = log
        self._process = start_process(run_script, _MAIN.with_name(name), words, log)

    def kill(self) -> int | None:
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()
        assert self._process.exitcode == 0, self.log.read_text()

    @property
    def running(self) -> bool:
        return self._process.is_alive()


def _run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Stand in for `subprocess.run`: the evaluator does not import torch anew either."""
    if Path(words[1]).name != "evaluate.py":
        return subprocess.run(words, **options)
    said = Path("evaluated.json").absolute()
    said.unlink(missing_ok=True)
    code = run_apart(run_script, Path(words[1]), words[2:], said)
    return subprocess.CompletedProcess(words, code or 0, said.read_text())


def test_the_main_job_where_one_was_broken_off_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("torch", "sklearn", "moto", "boto3"):
        pytest.importorskip(module)
    monkeypatch.syspath_prepend(_MAIN.parent)
    program = importlib.import_module("main")
    monkeypatch.delitem(sys.modules, "main")  # other examples may have one
    monkeypatch.setattr(program, "Program", _Trained)
    ours = {**vars(subprocess), "run": _run}
    monkeypatch.setattr(program, "subprocess", SimpleNamespace(**ours))
    monkeypatch.setattr(program, "STEPS", 240)
    monkeypatch.setattr(sys, "argv", ["main.py", "demo"])
    monkeypatch.chdir(tmp_path)
    with holdfast.init("demo/registry") as reg:
        reg.create_run("demo1-killed")
    with patch.dict(os.environ):  # it leads clients of S3 to a server of its own
        status = program.main()
    said = capsys.readouterr().out
    assert status == 0, said
    assert "FAIL" not in said
    assert "every claim held" in said
    with holdfast.open(tmp_path / "demo" / "registry", read_only=True) as reg:
        branch = "demo2-killed-branch"
        assert reg.run_names() == ["demo1-killed", "demo2-killed", branch, "demo2-straight"]
        assert (
            reg.checkpoint(branch).digest == reg.checkpoint("demo2-killed/gates/plain_best").digest
        )
        assert list(reg.stored("demo2-killed/releases/latest").components) == ["model"]
        killed, straight = (reg.checkpoint(f"demo2-{name}") for name in ("killed", "straight"))
        assert killed.digest == straight.digest


def test_a_curriculum_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.syspath_prepend(_EXAMPLES / "curriculum")
    program = importlib.import_module("train")
    monkeypatch.delitem(sys.modules, "train")  # other examples have one
    learns = program.Brain.train

    def warned(brain: Any, stage: Any) -> Any:
        if brain.steps == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return learns(brain, stage)

    def train(run: str, *more: str) -> None:
        program.main(["--registry", str(tmp_path), "--run", run, "--steps", "8", *more])

    holdfast.init(tmp_path).close()
    monkeypatch.setattr(program.Brain, "train", warned)
    with pytest.raises(SystemExit):
        train("cut")
    monkeypatch.setattr(program.Brain, "train", learns)
    train("cut")
    train("straight")
    with holdfast.open(tmp_path) as reg:
        cut, straight = reg.run("cut"), reg.run("straight")
        ends = [cut.latest(phase=stage).step for stage in ("sounds", "words", "noisy-words")]
        assert ends == [8, 16, 24]
        steps = {one.step: one.digest for one in cut.checkpoints()}
        assert set(steps) - {one.step for one in straight.checkpoints()} == {13}  # when warned
        assert {one.step: one.digest for one in straight.checkpoints()}.items() <= steps.items()
        assert [one["step"] for one in cut.latest().meta["growth_history"]] == [0, 8]
    train("cut", "--back-to", "sounds", "--until", "words")
    with holdfast.open(tmp_path) as reg:
        assert reg.run("cut").latest().digest == steps[16]


Trains = Callable[..., tuple[int, str]]


@pytest.fixture
def trains(tmp_path: Path) -> Trains:
    """Runs the program in C until it ends, and returns its exit status and what it printed."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no compiler of C here")
    options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", tmp_path / "train"]
    subprocess.run([compiler, *options, _EXAMPLES / "c" / "train.c"], check=True)
    (tmp_path / "holdfast").write_text(_HOLDFAST)
    (tmp_path / "holdfast").chmod(0o755)
    with holdfast.init(tmp_path / "registry") as reg:
        for name in ("straight", "killed"):
            reg.create_run(name, monitor=holdfast.Monitor(metric="loss", mode="min"))
    given = {"HOLDFAST": str(tmp_path / "holdfast"), "HOLDFAST_REGISTRY": "registry"}

    def train(run: str, steps: int, every: int, act: str = "") -> tuple[int, str]:
        if act:
            (tmp_path / "act").write_text(f"{act}\n")
        with (tmp_path / "out").open("w+") as out:
            done = subprocess.run(
                [tmp_path / "train", run, str(steps), str(every)],
                cwd=tmp_path,
                env={**os.environ, **given},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            )
            return done.returncode, Path(out.name).read_text()

    return train


def check_same(registry: Path, steps: int) -> None:
    """Check that two runs ended with the same bits and the same losses, each once."""
    with holdfast.open(registry) as reg:
        killed, straight = reg.run("killed"), reg.run("straight")
        assert (killed.status, straight.status) == ("completed", "completed")
        assert killed.best() is not None
        assert killed.latest().digest == straight.latest().digest
        losses = [list(run.streams["loss"].read()) for run in (killed, straight)]
        assert losses[0] == losses[1]
        assert [one["step"] for one in losses[0]] == list(range(1, steps + 1))
        assert reg.verify(deep=True).findings == ()


def test_a_program_in_c_survives_every_death(trains: Trains, tmp_path: Path) -> None:
    assert "no such run" in trains("strait", 50, 50)[1]
    assert trains("straight", 50, 50)[0] == 0
    assert trains("killed", 50, 10, "before")[0] == -signal.SIGKILL
    assert trains("killed", 50, 10, "warned")[0] == 128 + signal.SIGTERM
    with holdfast.open(tmp_path / "registry") as reg:
        assert (reg.run("killed").status, reg.run("killed").latest().step) == ("interrupted", 10)
    moment = random.uniform(0, 0.4)
    assert trains("killed", 50, 10, f"within {moment}")[0] == -signal.SIGKILL
    with holdfast.open(tmp_path / "registry") as reg:
        saved = reg.run("killed").latest().step
    assert trains("killed", 50, 10, "late")[0] == -signal.SIGKILL
    # The push that outlived its program is waited for; the one that is refused is made up for.
    status, told = trains("killed", 50, 10, "away")
    assert status == 0, told
    assert f"pulled: killed/main/step{saved + 10:08d}" in told
    assert f"pushed: killed/main/step{saved + 20:08d}" not in told
    check_same(tmp_path / "registry", 50)


@pytest.mark.soak
def test_a_program_in_c_dies_in_each_push(trains: Trains, tmp_path: Path) -> None:
    begun = time.monotonic()
    assert trains("straight", 100, 100)[0] == 0
    of_three_commands = time.monotonic() - begun
    status, told = -signal.SIGKILL, ""
    while status:
        moment = random.uniform(0, of_three_commands)
        status, told = trains("killed", 100, 10, f"within {moment}")
        assert status in (0, -signal.SIGKILL), told
    check_same(tmp_path / "registry", 100)


def test_each_schedule_of_a_night_has_a_command_that_works(tmp_path: Path) -> None:
    folder, found = _EXAMPLES / "night", dict[str, str]()
    for path in folder.iterdir():
        text = path.read_text()
        lines = re.findall(
            r"^(?:[\d* ]+ |ExecStart=/usr/bin/env )(?:chronic )?((?:/opt/\S+/)?holdfast .+)$",
            text,
            re.M,
        )
        if path.name == "cronjob.yaml":
            (job,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "CronJob")
            (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
            lines = [shlex.join(["holdfast", *container["args"]])]
        if lines:
            (found[path.name],) = lines
    assert set(found) == {"crontab", "scrontab", "holdfast-care.service", "cronjob.yaml"}
    for place in "registry", "mirror":
        holdfast.init(tmp_path / place).close()
    for line in found.values():
        words = ["mirror" if word.startswith("s3://backup") else word for word in line.split()]
        words = ["care.prom" if word.endswith(".prom") else word for word in words]
        (tmp_path / "care.prom").unlink(missing_ok=True)
        words = [
            "registry" if word.endswith("/models") or "models/" in word else word for word in words
        ]
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.registry.cli", *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "HOLDFAST_REGISTRY": "registry"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), line
        assert done.stdout.startswith("ok: prune: ")
        assert "holdfast_care_timestamp_seconds" in (tmp_path / "care.prom").read_text()


def test_systemd_takes_the_units_of_a_night() -> None:
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("systemd-analyze is not installed")
    units = (_EXAMPLES / "night" / f"holdfast-care.{kind}" for kind in ("service", "timer"))
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    timer = (_EXAMPLES / "night" / "holdfast-care.timer").read_text()
    (calendar,) = re.findall(r"^OnCalendar=(.+)$", timer, re.M)
    words = [analyze, "calendar", calendar]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Normalized form: {calendar}" in done.stdout


def test_the_job_of_kubernetes_has_the_fields_of_its_schema(tmp_path: Path) -> None:
    """kubectl reads the job into its types, which drop a field that they do not have."""
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("kubectl is not installed")
    loaded = yaml.safe_load_all((_EXAMPLES / "night" / "cronjob.yaml").read_text())
    (job,) = (one for one in loaded if one["kind"] == "CronJob")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    words = [kubectl, "set", "env", "--local", "-f", "job.yaml", "TRIED=1", "-o", "json"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def check(given: Any, known: Any, at: str) -> None:
        if isinstance(given, dict):
            for name, value in given.items():
                assert name in known, f"{at}.{name}"
                check(value, known[name], f"{at}.{name}")
        elif isinstance(given, list):
            for n, value in enumerate(given):
                check(value, known[n], f"{at}[{n}]")
        else:
            assert given == known, at

    check(job, json.loads(done.stdout), "job")
