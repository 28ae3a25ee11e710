"""The command as a process: status, streams, signals, start-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.registry.cli.calling import HOLDFAST, start

_SLOW = """
import signal, time, holdfast.registry.cli.files as files
# A job in the background of a script, as CI may be, inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def read(self, path, *, portable, format=None, max_bytes=None):
        print("ready", flush=True)
        time.sleep(60)
files.formats = Slow()
from holdfast.registry.cli import main
main()
"""

_EARLY = """
import importlib.abc, os, signal, sys
from holdfast.registry.cli import main
assert "holdfast.registry.cli.app" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt(*given, **named):
    print({during!r}, flush=True)
    os.kill(os.getpid(), {number})
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "holdfast.registry.cli.app":
            interrupt()
if {during!r} == "importing":
    sys.meta_path.insert(0, Finder())
else:
    import typer.main
    typer.main.get_command = interrupt
main()
"""


def test_status_and_streams(url: str) -> None:
    with start(HOLDFAST, "ls", "demo", "-r", url) as process:
        out, err = process.communicate()
    assert process.returncode == 0
    assert err == ""
    assert "\x1b" not in out
    with start(HOLDFAST, "show", "demo/tags/keepr", "-r", url) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (4, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals(number: signal.Signals, status: int, url: str) -> None:
    arguments = ["push", "x.pt", "demo", "--step", "1", "-r", url]
    with start([sys.executable, "-c", _SLOW], *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert process.returncode == status
    assert "everything committed before this stays" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("during", ["importing", "building"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_before_any_command_runs(
    number: signal.Signals, status: int, during: str, url: str
) -> None:
    code = _EARLY.format(number=int(number), during=during)
    with start([sys.executable, "-c", code], "ls", "-r", url) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == status
    assert out == f"{during}\n"
    assert err == ("interrupted\n" if number == signal.SIGINT else "ended by signal 15\n")


def test_a_reader_that_goes_away(url: str) -> None:
    with start(HOLDFAST, "show", "demo", "--tensors", "-r", url) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 141
    assert err == ""


def test_an_output_that_is_closed_or_full(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_REGISTRY", url)

    def redirected(how: str, *arguments: str) -> tuple[int, str]:
        command = ["sh", "-c", f'exec "$@" {how}', "sh", *HOLDFAST, *arguments]
        with start(command) as process:
            return process.wait(), process.communicate()[1]

    # The command writes files while it has no output: none may get its number.
    assert redirected("<&- >&- 2>&-", "tag", "set", "demo/latest", "kept") == (0, "")
    status, said = redirected(">/dev/full", "show", "demo/tags/kept", "--json")
    assert status == 7
    assert said.startswith("error: the output could not be written; found [Errno 28]")
    status, said = redirected(">/dev/full", "--help")
    assert (status, "Traceback" in said) == (7, False)
    assert said.count("\n") == 1


def test_output_of_another_encoding(url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    (tmp_path / "ü.bin").write_bytes(b"x")
    done = subprocess.run(
        [*HOLDFAST, "push", str(tmp_path / "ü.bin"), "demo", "--step", "9", "-r", url],
        capture_output=True,
        env=environment,
        check=True,
    )
    assert b"opaque" in done.stdout
    done = subprocess.run(
        [*HOLDFAST, "show", "demo/phase2/step9", "-r", url],
        capture_output=True,
        env=environment,
        check=True,
    )
    assert rb"\xfc.bin" in done.stdout


def test_help_and_lists_load_nothing_heavy(url: str) -> None:
    code = (
        "import sys\n"
        "from holdfast.registry.cli.app import app\n"
        "lines = ['--help', 'run ls', 'run show demo', 'ls demo', 'show demo/latest', 'log demo']\n"
        "for line in lines:\n"
        "    try: app(line.split())\n"
        "    except SystemExit as ended: assert not ended.code, line\n"
        "heavy = {'torch', 'numpy', 'boto3', 'botocore', 's3fs', 'safetensors', 'rich.console'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HOLDFAST_REGISTRY": url},
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_imports_no_command_and_a_command_no_other() -> None:
    """And none of them all of pydantic, as typer does to read the text of an option; nor does a
    list of runs import what saves.
    """
    code = (
        "import sys\n"
        "from holdfast.registry.cli import main\n"
        "sys.argv[1:] = {arguments}\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "found = {{name.split('.')[-1] for name in sys.modules if '.cli.' in name}}\n"
        "print('LOADED', *sorted({modules} & found), *{heavy} & set(sys.modules))"
    )
    modules = {"checkpoints", "diffs", "presets", "registries", "run_listing", "runs", "usage"}
    heavy = {"pydantic", "holdfast.registry.writing"}
    words = ["run", "ls", "-r", "nowhere", "--storage-option", "a=1", "--sort", "age"]
    for arguments, loaded in (
        *((["--help"], ""), (["run", "-h"], "")),
        *((["preset"], " presets"), (words, " run_listing")),
    ):
        program = code.format(arguments=arguments, modules=modules, heavy=heavy)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == f"LOADED{loaded}"
