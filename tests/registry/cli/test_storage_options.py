"""`--storage-option` and its variables: they lead every command to the store."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.registry.cli.app import app
from tests.registry.cli.calling import HOLDFAST
from tests.servers.fixtures import S3Server
from tests.support.commands import invoke

SECRET = "SECRET-that-nobody-may-see"
VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def options(
    moto_server: S3Server, moto_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What leads to moto; the environment of AWS does not, and this machine has no AWS."""
    monkeypatch.setenv("TEST_URL", moto_url())
    monkeypatch.setenv("TEST_URL_2", moto_url())
    for name in VARIABLES:
        monkeypatch.delenv(name)
    return {
        "client_kwargs": {"endpoint_url": moto_server.endpoint_url},
        "key": "test",
        "secret": SECRET,
    }


@pytest.fixture
def s3(options: dict[str, Any]) -> str:
    """A registry with a checkpoint."""
    url = os.environ["TEST_URL"]
    with holdfast.init(url, skip_race_probe=True, storage_options=options) as made:
        made.create_run("demo", seed=1).save({"w": np.arange(5)}, step=7)
    return url


def given(options: dict[str, Any], name: str = "--storage-option") -> list[str]:
    """Return options as arguments, except credentials."""
    endpoint_url = options["client_kwargs"]["endpoint_url"]
    return [name, f"client_kwargs.endpoint_url={endpoint_url}"]


def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put credentials where every AWS client finds them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def ok(*arguments: object) -> str:
    found = invoke(*arguments)
    assert found.exit_code == 0, found.output
    assert SECRET not in found.output
    return found.output


def test_options_of_the_command_line_and_the_environment(
    s3: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_STORAGE_OPTIONS", json.dumps({"secret": SECRET, "key": "k"}))
    assert "step" in ok("ls", "-r", s3, *given(options))
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "1")
    assert invoke("ls", "-r", s3).exit_code == 7  # there is no AWS here
    monkeypatch.delenv("HOLDFAST_S3_TIMEOUT")
    monkeypatch.delenv("HOLDFAST_STORAGE_OPTIONS")
    credentials(monkeypatch)
    assert "demo" in ok("run", "ls", "-r", s3, *given(options))
    assert "demo" in ok("ls", "-r", s3, *given(options))
    ok("tag", "set", "demo/latest", "kept", "-r", s3, *given(options))
    assert "fail" not in ok("doctor", "-r", s3, *given(options)).partition("race")[0]
    ok("trust", s3, *given(options))
    ok("pull", "demo", "--to", tmp_path / "x.safetensors", "-r", s3, *given(options))


def test_library_reads_the_environment_for_its_registry(
    s3: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORAGE_OPTIONS", json.dumps(options))
    monkeypatch.setenv("HOLDFAST_REGISTRY", s3)
    with holdfast.open() as found:
        assert found.checkpoint("demo").step == 7
    # Options of that registry do not go to another server.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "1")
    with pytest.raises(StorageError):
        holdfast.open(s3)


def test_sync_has_options_for_each_side(
    s3: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    credentials(monkeypatch)
    second = os.environ["TEST_URL_2"]
    ok("init", second, "--skip-race-probe", *given(options))
    both = [*given(options, "--src-storage-option"), *given(options, "--dst-storage-option")]
    assert "1 run copied" in ok("sync", s3, second, *both)
    folder = tmp_path / "folder"
    ok("init", folder)
    assert "1 run copied" in ok("sync", second, folder, *given(options, "--src-storage-option"))
    # A variable for both sides; a folder has no options.
    monkeypatch.setenv("HOLDFAST_STORAGE_OPTIONS", json.dumps(options))
    assert "1 up to date" in ok("sync", folder, second)
    assert "1 up to date" in ok("sync", s3, second)
    monkeypatch.setenv("HOLDFAST_DST_STORAGE_OPTIONS", '{"nonsense": 1}')
    found = invoke("sync", folder, second)
    assert found.exit_code == 3
    assert "nonsense" in found.output
    monkeypatch.delenv("HOLDFAST_DST_STORAGE_OPTIONS")
    assert "nothing to mend" in ok("repair", "--from", second, "-r", s3)
    monkeypatch.setenv("HOLDFAST_FROM_STORAGE_OPTIONS", "{")
    assert invoke("repair", "--from", second, "-r", s3).exit_code == 3


def test_sync_of_the_library_has_options_for_each_side(
    s3: str, options: dict[str, Any], tmp_path: Path
) -> None:
    second, folder = os.environ["TEST_URL_2"], tmp_path / "folder"
    holdfast.init(folder).close()
    report = holdfast.sync(s3, folder, src_storage_options=options)
    assert [run.run_id for run in report.runs] == ["demo"]
    holdfast.init(second, skip_race_probe=True, storage_options=options).close()
    report = holdfast.sync(folder, second, dst_storage_options=options)
    assert report.runs[0].checkpoints == 1
    with (
        holdfast.open(folder) as opened,
        pytest.raises(holdfast.RegistryError, match="src_storage"),
    ):
        holdfast.sync(opened, second, src_storage_options=options, dst_storage_options=options)


def test_command_for_a_checkpoint_finds_the_registry(
    s3: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    credentials(monkeypatch)
    show = "sh -c 'echo $HOLDFAST_REGISTRY $HOLDFAST_STORAGE_OPTIONS'"
    ok("watch", "demo", "--once", "--exec", show, "-r", s3, *given(options))
    url, _, text = capfd.readouterr().out.partition("\n")[0].partition(" ")
    assert url == s3
    assert json.loads(text) == {"client_kwargs": options["client_kwargs"]}


@pytest.mark.parametrize("how", ["file", "variable"])
def test_configuration_of_fsspec_counts(
    how: str, s3: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process of its own: fsspec reads its configuration once."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    if how == "file":
        folder = tmp_path / ".config" / "fsspec"
        folder.mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"s3": options}))
    else:
        environment["FSSPEC_S3"] = json.dumps(options)
    command = [*HOLDFAST, "ls", "-r", s3]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--storage-option", SECRET], "--storage-option, number 1"),
        (["--storage-option", f"nonsense={SECRET}"], "nonsense"),
        (["--storage-option", f"client_kwargs.x={SECRET}"], r"client_kwargs.x"),
        (["--storage-option", f"client_kwargs={SECRET}"], "client_kwargs"),
        (["--storage-option", f"anon={SECRET}"], "anon"),
        (["--storage-option", "config_kwargs.read_timeout=soon"], "config_kwargs.read_timeout"),
        (
            ["--storage-option", f"secret={SECRET}", "--storage-option", "secret=x"],
            "secret: .*twice",
        ),
    ],
)
def test_wrong_option_is_named_and_shows_no_value(arguments: list[str], said: str) -> None:
    found = invoke("ls", "-r", "s3://bucket/x?endpoint_url=http://127.0.0.1:1", *arguments)
    assert found.exit_code == 3, found.output
    assert SECRET not in found.output
    assert re.search(said, " ".join(found.output.split())), found.output


@pytest.mark.parametrize("store", ["azure_url", "gs_url"])
def test_doctor_counts_every_bucket_as_one(
    store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = request.getfixturevalue(store)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    holdfast.init(url).close()
    found = json.loads(ok("doctor", "-r", url, "--json"))
    checks = {one["name"]: one for one in found["checks"]}
    assert checks["race"]["status"] == "ok"
    assert "of registries in buckets" not in checks["cache"]["message"]


def test_folder_has_no_options(tmp_path: Path) -> None:
    holdfast.init(tmp_path / "r").close()
    found = invoke("ls", "-r", tmp_path / "r", "--storage-option", f"secret={SECRET}")
    assert found.exit_code == 3
    assert "no options" in found.output
    assert SECRET not in found.output


def every(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, one in command.commands.items():
            yield from every(one, (*path, name))
    else:
        yield path, command


def test_every_command_with_a_registry_takes_options() -> None:
    from typer.main import get_command

    found = 0
    for path, command in every(get_command(app)):
        context = command.make_context(path[-1], ["x"], resilient_parsing=True)
        names = {name for one in context.command.params for name in one.opts}
        assert ("--registry" in names) == ("--storage-option" in names), path
        found += "--storage-option" in names
    assert found > 30
