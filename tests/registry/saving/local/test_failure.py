"""The exception that ended a training: kept in the log, shown, bounded, and without secrets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.history.action_texts import in_words
from holdfast.registry.saving.ending import failure_text

STATE = {"w": np.arange(20)}


class Broken(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        return "x" * 100_000


def raising(error: BaseException) -> None:
    hunter2 = "a local that nobody sees"  # noqa: F841
    raise error


def fail(run: holdfast.Run, error: BaseException) -> None:
    with run:
        run.save(STATE, step=1)
        raising(error)


def test_the_log_keeps_type_message_and_frames(reg) -> None:
    run = reg.create_run("run")
    with pytest.raises(ValueError):
        fail(run, ValueError("shapes do not fit"))
    run = reg.run("run")
    assert run.status == "failed"
    first, *frames = run.manifest.reason.splitlines()
    assert first == "ValueError: shapes do not fit"
    assert frames[0].endswith(" in raising")
    assert f"{Path(__file__).name}:" in frames[0]
    (action,) = list(run.history.commits())[-1].actions
    assert in_words(action, {}, 0).startswith("status failed, ValueError: shapes do not fit, at ")
    run.status = "running"
    assert run.manifest.reason is None


def test_a_journal_carries_it(tmp_path: Path) -> None:
    holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    with holdfast.open(tmp_path / "reg", journal=tmp_path / "journal") as reg:
        run = reg.create_run("run")
        with pytest.raises(ValueError):
            fail(run, ValueError("no"))
        run.wait(remote=True)
    with holdfast.open(tmp_path / "reg") as reg:
        assert reg.run("run").manifest.reason.startswith("ValueError: no\n")


def test_a_signal_or_an_exit_has_no_reason(reg) -> None:
    run = reg.create_run("run")
    with pytest.raises(SystemExit):
        fail(run, SystemExit(3))
    assert (run.status, run.manifest.reason) == ("interrupted", None)


@pytest.mark.parametrize("error", [Broken(), ValueError("a\x1b[31m\nb"), ValueError()])
def test_it_is_bounded_and_printable(error) -> None:
    def deeper(n: int) -> None:
        deeper(n - 1) if n else raising(error)

    try:
        deeper(100)
    except Exception as caught:
        text = failure_text(caught)
    assert len(text) < 2_000
    assert len(text.splitlines()) <= 6
    assert "\x1b" not in text
    assert "nobody" not in text


def test_secrets_are_hidden(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
    said = "login as abcdef123456 failed: https://me:pw1234@host/x?sig=zzz token=hunter2, lr=3"
    text = failure_text(RuntimeError(said))
    assert text.startswith("RuntimeError: login as *** failed: ")
    assert not any(one in text for one in ("abcdef", "pw1234", "zzz", "hunter2"))
    assert text.endswith("lr=3")


def test_an_exception_that_nobody_caught_is_kept_without_a_block(tmp_path: Path) -> None:
    holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    program = f"""
        import numpy, holdfast
        run = holdfast.open({str(tmp_path / "reg")!r}).create_run("run")
        run.save({{"w": numpy.arange(20)}}, step=1)
        raise RuntimeError("out of data")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    with holdfast.open(tmp_path / "reg") as reg:
        assert reg.run("run").manifest.reason.startswith("RuntimeError: out of data\nat ")
