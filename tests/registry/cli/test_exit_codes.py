"""One test for each row of the table of exit codes in `docs/cli.md`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.registry import errors
from holdfast.registry.cli import opening
from holdfast.registry.cli.process import Terminated
from holdfast.registry.store.store import RegistryConfig
from tests.registry.cli.calling import Call

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


def test_0_done(call: Call) -> None:
    assert call("ls").stderr == ""


def test_1_a_fault_of_our_own(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("evil\x1b[31m")

    monkeypatch.setattr(opening, "open", fail)
    result = call("ls", status=1)
    assert "ZeroDivisionError: evil\\x1b[31m" in result.stderr
    assert "HOLDFAST_DEBUG=1" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in call("--debug", "ls", status=1).stderr
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    assert "Traceback" in call("ls", status=1).stderr


def test_2_usage(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call("show", status=2)
    call("push", "x", "demo", "--step", "many", status=2)
    monkeypatch.delenv("HOLDFAST_REGISTRY")
    assert "HOLDFAST_REGISTRY" in call("ls", status=2).stderr


def test_3_input(call: Call, tmp_path: Path) -> None:
    result = call("push", tmp_path / "absent", "demo", "--step", 1, status=3)
    assert result.stderr == f"error: {tmp_path}/absent: no such file\n"
    call("ls", "-r", "nosuchscheme://x", status=3)
    call("show", "demo/main/steps", status=3)


def test_3_credentials_in_a_url_are_not_repeated(call: Call) -> None:
    result = call("ls", "-r", "s3://user:hunter2@bucket", status=3)
    assert "hunter2" not in result.output


def test_4_names(call: Call, tmp_path: Path) -> None:
    result = call("show", "demo/tags/keepr", status=4)
    assert result.stderr.splitlines()[-1] == "hint: Did you mean 'keeper'?"
    call("ls", "-r", tmp_path, status=4)


def test_5_conflict(call: Call, url: str) -> None:
    assert "already" in call("init", url, status=5).stderr
    call("run", "create", "demo", status=5)


def test_6_damage(call: Call, tmp_path: Path) -> None:
    for pack in (tmp_path / "reg" / "packs").rglob("*.0"):
        pack.chmod(0o644)
        data = bytearray(pack.read_bytes())
        data[100] ^= 1
        pack.write_bytes(data)
    result = call("verify", "--deep", status=6)
    assert "affects demo/" in result.stdout
    assert call("verify", "--deep", "--json", status=6).stdout.startswith('{\n  "ok": false')
    result = call("pull", "demo", "--to", tmp_path / "x.pt", status=6)
    assert "verify --deep" in result.stderr
    assert not (tmp_path / "x.pt").exists()


def test_7_store(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        error = errors.AccessDenied("the token has expired", where="s3://b", hint="Log in.")
        error.add_note("tried 3 times")
        raise error

    monkeypatch.setattr(opening, "open", fail)
    assert call("ls", status=7).stderr.splitlines() == [
        "error: s3://b: the token has expired",
        "note: tried 3 times",
        "hint: Log in.",
    ]


def test_8_cannot_be_worked_with(call: Call, tmp_path: Path) -> None:
    from holdfast.registry.objects.framing import join_lines

    config = RegistryConfig(id="0" * 32, created_ms=0, race_probe="passed", min_writer=99)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "registry.json").write_bytes(join_lines([config.encode()]))
    assert "pip install -U" in call("ls", "-r", tmp_path / "newer", status=8).stderr
    call("doctor", "-r", tmp_path / "newer", status=8)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(15), 143, "signal 15"),
    ],
)
def test_128_and_more_signals(
    error: BaseException, status: int, text: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(opening, "open", fail)
    assert text in call("ls", status=status).stderr


def test_the_documented_table_is_that_of_the_classes() -> None:
    table = dict(re.findall(r"^\| (\d+) \|.*?\| (.*) \|$", DOCS.read_text(), re.MULTILINE))
    for name in errors.__all__:
        status = str(getattr(errors, name).exit_code)
        assert f"`{name}`" in table[status], f"{name} should stand at {status}"
