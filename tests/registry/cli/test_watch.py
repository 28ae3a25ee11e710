"""`watch`: a command for each checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.cli import executing as module
from holdfast.registry.face.run import Run
from holdfast.registry.history.actions import Acknowledge, Claim
from holdfast.registry.spec import Phase, RunSpec
from tests.registry.cli.calling import HOLDFAST, Call, start

_VALUES = ("REF", "ID", "RUN", "STEP", "PHASE", "REGISTRY")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a Python program; returns the command line that runs it."""

    def write(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return f"{sys.executable} {tmp_path / 'script.py'}"

    return write


def said(url: str, kind: type) -> list[int]:
    """Return the steps of the checkpoints that were claimed or acknowledged, in log order."""
    with holdfast.open(url) as opened:
        run: Run = opened.run("demo")
        return [
            run.history.checkpoint(action.checkpoint).step
            for commit in run.history.commits()
            for action in commit.actions
            if isinstance(action, kind)
        ]


def test_a_command_runs_for_each_checkpoint(call: Call, script, url: str, tmp_path: Path) -> None:
    command = script(
        "import os, sys\n"
        f"with open({str(tmp_path / 'told')!r}, 'a') as file:\n"
        f"    for name in {_VALUES!r}: print(os.environ['HOLDFAST_' + name], file=file)\n"
        "    print(sys.argv[1:], file=file)\n"
    )
    words = "{ref} id={id} {run}/{step}/{phase} '{other x} {{ref}} ${{step}}' {step}{step}"
    result = call("watch", "demo", "--once", "--exec", f"{command} {words}")
    assert result.stdout.splitlines() == [
        *("done: demo/main/step00000010", "done: demo/phase2/step00000020")
    ]
    assert "2 checkpoints done; no more will come" in result.stderr
    with holdfast.open(url) as opened:
        first, second = opened.run("demo").checkpoints()
    assert (tmp_path / "told").read_text().splitlines() == [
        *("demo/main/step00000010", first.digest.hex(), "demo", "10", "main", url),
        f"['demo/main/step00000010', 'id={first.digest.hex()}', 'demo/10/main', "
        "'{other x} {ref} ${step}', '1010']",
        *("demo/phase2/step00000020", second.digest.hex(), "demo", "20", "2", url),
        f"['demo/phase2/step00000020', 'id={second.digest.hex()}', 'demo/20/2', "
        "'{other x} {ref} ${step}', '2020']",
    ]
    assert said(url, Acknowledge) == [10, 20]
    assert call("watch", "demo", "--once", "--exec", command).stdout == ""


def test_no_shell_reads_the_command(call: Call, script, tmp_path: Path) -> None:
    command = script(
        "import sys; assert sys.argv[1:] == ['$HOME', ';', 'false', '${x}', '{1}'], sys.argv"
    )
    call("watch", "demo", "--once", "--exec", f"{command} $HOME ; false ${{x}} {{1}}")


def test_phase_and_group(call: Call, script, url: str) -> None:
    arguments = ["watch", "demo", "--once", "--exec", script("")]
    assert "step00000020" in call(*arguments, "--phase", 2).stdout
    assert "step00000010" in call(*arguments).stdout
    assert call(*arguments, "--group", "other").stdout.count("done: ") == 2


def test_an_unknown_placeholder_is_refused_before_anything_is_claimed(
    call: Call, script, url: str
) -> None:
    refused = call("watch", "demo", "--once", "--exec", f"{script('')} {{rf}}", status=3).stderr
    assert "--exec {rf}: no such placeholder; expected {ref}, {id}" in refused
    assert "Did you mean 'ref'? Write {{rf}} for" in refused
    assert said(url, Claim) == []


def test_a_phase_that_is_not_there(call: Call, script, url: str, tmp_path: Path) -> None:
    arguments = ["--once", "--exec", script(""), "--phase", "mian"]
    refused = call("watch", "demo", *arguments, status=4).stderr
    assert "phase mian: no checkpoint of this phase yet; found phases main, 2" in refused
    assert "'main'" in refused
    with holdfast.open(url) as opened:
        opened.run("demo").status = "completed"
        opened.create_run("two", preset=RunSpec(phases=(Phase(name="main"),)))
    # It may come yet: who waits for it is told, and waits.
    assert "'main'" in call("watch", "demo", *arguments[1:]).stderr
    assert "'main'" in call("watch", "two", *arguments[1:], status=3).stderr
    assert said(url, Claim) == []


def test_what_others_hold_is_told_in_the_end(call: Call, script, url: str) -> None:
    with holdfast.open(url) as opened:
        coming = opened.run("demo").follow.checkpoints(group="default", follow=False)
        assert next(coming).step == 10
        arguments = ["watch", "demo", "--once", "--exec", script("")]
        told = call(*arguments).stderr
        assert re.search(r"1 checkpoint done; 1 held by another follower until \d{4}-.*Z$", told)
        assert "held by" not in call(*arguments, "--phase", 2).stderr
        coming.acknowledge()
    assert "no more will come" in call(*arguments).stderr


def test_a_run_that_ends_ends_it(call: Call, script, url: str) -> None:
    with holdfast.open(url) as opened:
        opened.run("demo").status = "completed"
    assert call("watch", "demo", "--exec", script("")).stdout.count("done: ") == 2


def test_a_command_that_fails_is_tried_again(call: Call, script, url: str, tmp_path: Path) -> None:
    command = script(
        "import pathlib, sys\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "tries = log.read_text() if log.exists() else ''\n"
        "log.write_text(tries + 'x')\n"
        "sys.exit(0 if len(tries) >= 2 else 7)\n"
    )
    result = call("watch", "demo", "--once", "--phase", "2", "--exec", command)
    assert result.stdout == "done: demo/phase2/step00000020\n"
    assert "demo/phase2/step00000020: exit status 7, attempt 2 of 3" in result.stderr
    assert said(url, Claim) == [20, 20, 20]  # renewed for each further try
    assert said(url, Acknowledge) == [20]


def test_a_command_that_never_succeeds_ends_it(call: Call, script, url: str) -> None:
    command = script("import sys; sys.exit(9)")
    arguments = ["watch", "demo", "--once", "--exec", command, "--attempts", 2]
    result = call(*arguments, status=1)
    assert "error: demo/main/step00000010: " in result.stderr
    assert "exit status 9, 2 attempts" in result.stderr
    assert said(url, Acknowledge) == []
    # It is held still: another follower goes on with the next one.
    assert "demo/phase2/step00000020: " in call(*arguments, status=1).stderr
    assert call(*arguments).stdout == ""


def test_a_follower_of_a_name_goes_on_at_once(call: Call, script, url: str) -> None:
    arguments = ["watch", "demo", "--once", "--follower", "job-7", "--exec"]
    call(*arguments, script("import sys; sys.exit(1)"), "--attempts", 1, status=1)
    assert call(*arguments, script("")).stdout.count("done: ") == 2


def test_a_command_killed_by_a_signal(call: Call, script) -> None:
    command = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    arguments = ["watch", "demo", "--once", "--attempts", 1, "--exec", command]
    assert "ended by signal 9, 1 attempt" in call(*arguments, status=1).stderr


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("", 2, "names no command"),
        ("a 'b", 2, "No closing quotation"),
        ("/no/such/command x", 3, "no such command"),
        ("{step} x", 3, "cannot be started"),
    ],
)
def test_a_command_that_cannot_be_started(
    command: str, status: int, text: str, call: Call, url: str
) -> None:
    result = call("watch", "demo", "--once", "--exec", command, status=status)
    assert text in " ".join(result.stderr.split())
    assert said(url, Acknowledge) == []


def test_the_hold_is_as_long_as_asked(call: Call, script, url: str) -> None:
    call("watch", "demo", "--once", "--exec", script(""), "--hold", 10**7)
    with holdfast.open(url) as opened:
        run = opened.run("demo")
        for commit in run.history.commits():
            for action in commit.actions:
                if isinstance(action, Claim):
                    assert action.until_ms - commit.time_ms == pytest.approx(10**10, abs=60_000)
    call("watch", "demo", "--once", "--exec", "true", "--hold", 0, status=3)


_STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
_MAIN = """
import signal
# A job in the background of a script, as CI may be, inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from holdfast.registry.cli import main
main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_and_what_it_started(
    number: signal.Signals, status: int, url: str, script
) -> None:
    arguments = ["watch", "demo", "-r", url, "--exec", script(_STUBBORN)]
    with start([sys.executable, "-c", _MAIN], *arguments) as process:
        assert process.stdout is not None
        word, *pids = process.stdout.readline().split()
        assert word == "ready"
        process.send_signal(number)
        # The pipe is read to its end only when nobody holds it any more: they are gone.
        _, err = process.communicate(timeout=300)
    assert process.returncode == status
    assert "everything committed before this stays" in err
    assert len(pids) == 2
    for pid in pids:
        assert not _runs(int(pid))
    assert said(url, Claim) == [10]
    assert said(url, Acknowledge) == []


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody reaps an orphan in some containers


def test_a_command_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, script) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    command = script(
        "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sys.stdout.write('deaf\\n')\nsys.stdout.flush()\nsignal.pause()\n"
    )
    child = module.subprocess.Popen(command.split(), stdout=module.subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"deaf\n"
    module.end(child)
    assert child.returncode == -signal.SIGKILL


def test_output_of_the_command_stands_in_order(
    url: str, script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = script("import sys; print('command', sys.argv[1])")
    arguments = ["watch", "demo", "--once", "-r", url, "--exec", f"{command} {{step}}"]
    with start(HOLDFAST, *arguments) as process:
        out, _ = process.communicate(timeout=300)
    assert out.splitlines() == [
        *("command 10", "done: demo/main/step00000010"),
        *("command 20", "done: demo/phase2/step00000020"),
    ]
    assert os.environ.get("HOLDFAST_STEP") is None
