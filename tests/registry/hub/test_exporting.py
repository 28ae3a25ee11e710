"""A release as plain files: whole before it is announced, and never written again."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import holdfast
from holdfast.backends import open_files
from holdfast.backends.fsspec.files import Files
from holdfast.errors import (
    Conflict,
    Damaged,
    IncompatibleState,
    IntegrityError,
    StorageError,
)
from holdfast.registry.curation import Release
from holdfast.registry.history import SigningKey
from holdfast.registry.hub import ViewOptions, export_release
from tests.registry.hub.conftest import folder_of_model
from tests.support.keys import write_key

_OPTIONS = ViewOptions(shard_bytes=200, artifacts=())


@pytest.fixture
def release(tmp_path: Path) -> Release:
    reg = holdfast.init(tmp_path / "reg", skip_race_probe=True)
    run = reg.create_run("llm")
    state = holdfast.formats.read(folder_of_model(tmp_path / "model")).state
    return run.releases.publish("1.0.0", run.save(state, step=1, metrics={"loss": 0.5}))


@pytest.fixture(params=["folder", "s3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a folder, or of a bucket and prefix on moto."""
    if request.param == "folder":
        return str(tmp_path / "out")
    return str(request.getfixturevalue("moto_url")())


def export(release: Release, target: str, options: ViewOptions = _OPTIONS) -> Any:
    return export_release(release, open_files(target), options)


def contents(url: str) -> dict[str, bytes]:
    """Return the files below a URL."""
    above, _, folder = url.rstrip("/").rpartition("/")
    files = open_files(above)
    return {name: b"".join(files.read(f"{folder}/{name}")) for name in files.sizes(folder)}


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    index = folder / "model.safetensors.index.json"
    found: Any = holdfast.formats.read(index).state
    return {name: one.numpy() for name, one in found["model"].items()}


def test_the_files_are_those_of_the_release_and_the_marker_names_them(
    release: Release, target: str
) -> None:
    made = export(release, target)
    found = contents(made.url)
    marker = json.loads(found.pop("holdfast.json"))
    assert made.url.startswith(f"{target.partition('?')[0]}/llm/1.0.0/")
    assert (marker["ref"], marker["id"]) == ("llm/releases/1.0.0", str(release.digest))
    assert {name: one["sha256"] for name, one in marker["files"].items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in found.items()
    }
    shards = [name for name in found if name.endswith(".safetensors")]
    assert len(shards) == 4
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"} < set(
        found
    )
    assert not [name for name in found if name.endswith((".py", ".bin"))]  # nothing that runs
    assert (made.files, made.is_new) == (len(found), True)
    assert made.size_bytes == sum(map(len, found.values()))


def test_the_tensors_are_those_of_the_checkpoint(release: Release, tmp_path: Path) -> None:
    made = export(release, str(tmp_path / "out"))
    found, stored = tensors(Path(made.url.removeprefix("file://"))), release.load()["model"]
    assert found.keys() == stored.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, np.asarray(stored[name]))


def test_a_second_export_writes_nothing(
    release: Release, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export(release, target)
    monkeypatch.setattr(Files, "write", lambda *_: pytest.fail("written again"))
    again = export(release, target)
    assert (again.url, again.is_new) == (first.url, False)


def test_another_version_and_other_shards_have_folders_of_their_own(
    release: Release, tmp_path: Path
) -> None:
    reg = holdfast.open(tmp_path / "reg")
    run = reg.run("llm")
    second = run.releases.publish("1.0.1", reg.checkpoint("llm"))
    out = str(tmp_path / "out")
    urls = [
        export(release, out).url,
        export(second, out).url,
        export(release, out, ViewOptions(10**9, ())).url,
    ]
    assert len(set(urls)) == 3
    before = contents(urls[0])
    assert contents(urls[0]) == before


@pytest.mark.parametrize("dies_at", range(9))
def test_an_export_that_dies_is_not_marked_and_is_completed_by_the_next(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    out, written = str(tmp_path / "out"), list[str]()
    write = Files.write

    def dying(self: Files, path: str, parts: Iterable[bytes]) -> None:
        if len(written) == dies_at:
            # In the middle of a file: its first byte was sent.
            write(self, path, _then_fail(parts))
        written.append(path)
        write(self, path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", dying)
        with pytest.raises(ConnectionError):
            export(release, out)
    folders = [path.parent for path in Path(out).rglob("*") if path.is_file()]
    assert not [folder for folder in folders if (folder / "holdfast.json").exists()]
    done = [path for path in Path(out).rglob("*") if path.is_file()]
    assert len(done) == dies_at  # no part of a file
    made = export(release, out)
    assert made.is_new
    assert "holdfast.json" in contents(made.url)


def _then_fail(parts: Iterable[bytes]) -> Iterable[bytes]:
    for part in parts:
        yield part[:1]
        raise ConnectionError("the process dies")


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_file_that_is_not_of_the_release_is_refused(
    release: Release, tmp_path: Path, is_marked: bool
) -> None:
    out = str(tmp_path / "out")
    made = export(release, out)
    folder = Path(made.url.removeprefix("file://"))
    if not is_marked:
        (folder / "holdfast.json").unlink()
    (folder / "extra.safetensors").write_bytes(b"loaders would read it")
    with pytest.raises(Conflict, match=r"extra\.safetensors"):
        export(release, out)


def test_a_marked_folder_that_lacks_a_file_is_refused_and_not_written(
    release: Release, tmp_path: Path
) -> None:
    made = export(release, str(tmp_path / "out"))
    config = Path(made.url.removeprefix("file://")) / "config.json"
    config.unlink()
    with pytest.raises(Conflict, match=r"config\.json"):
        export(release, str(tmp_path / "out"))
    assert not config.exists()


def test_bytes_that_change_on_their_way_are_found(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Files.write

    def lying(self: Files, path: str, parts: Iterable[bytes]) -> None:
        data = b"".join(parts)
        write(self, path, [data[:-1] + bytes([data[-1] ^ 1])])

    monkeypatch.setattr(Files, "write", lying)
    with pytest.raises(Damaged):
        export(release, str(tmp_path / "out"))
    assert not list(Path(tmp_path / "out").rglob("holdfast.json"))


def test_damage_in_the_registry_never_becomes_a_file(release: Release, tmp_path: Path) -> None:
    for pack in (tmp_path / "reg" / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 3] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    with pytest.raises(IntegrityError):
        export(release, str(tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("holdfast.json"))


def test_a_release_without_tensors_by_name_is_refused(tmp_path: Path) -> None:
    reg = holdfast.init(tmp_path / "reg", skip_race_probe=True)
    run = reg.create_run("r")
    release = run.releases.publish("1.0.0", run.save({"model": {"lr": 0.1}}, step=1))
    with pytest.raises(IncompatibleState):
        export(release, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_model_is_in_memory_at_a_time(tmp_path: Path) -> None:
    reg = holdfast.init(tmp_path / "reg", skip_race_probe=True)
    run = reg.create_run("r")
    rng = np.random.default_rng(0)
    state = {f"w{i}": rng.random((1000, 2000)) for i in range(8)}  # 128 MB
    release = run.releases.publish("1.0.0", run.save({"model": state}, step=1))
    del state
    tracemalloc.start()
    try:
        export(release, str(tmp_path / "out"), ViewOptions(10**9, ()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64e6


def test_a_store_that_refuses_is_a_typed_error_without_secrets(
    release: Release, moto_url: Callable[[], str]
) -> None:
    bucket = moto_url().partition("?")[0].removeprefix("s3://").partition("/")[0]
    with pytest.raises(StorageError) as failed:
        export_release(
            release, open_files(f"s3://{bucket}-absent/x", {"secret": "hunter22"}), _OPTIONS
        )
    assert "hunter22" not in str(failed.value)


# Readers that know nothing of Holdfast


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=50)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "model")
    reg = holdfast.init(tmp_path / "reg", skip_race_probe=True)
    run = reg.create_run("bert")
    saved = run.save(holdfast.formats.read(tmp_path / "model").state, step=1)
    made = export(
        run.releases.publish("1.0.0", saved), str(tmp_path / "out"), ViewOptions(9000, ())
    )
    assert made.files > 3  # it is in shards
    read = transformers.AutoModel.from_pretrained(made.url.removeprefix("file://"))
    found, wanted = read.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(bool((found[name] == wanted[name]).all()) for name in wanted)


def test_the_streamer_of_vllm_and_sglang_reads_them(
    release: Release, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = pytest.importorskip(
        "runai_model_streamer", reason="runai-model-streamer is not installed"
    )
    if target.startswith("s3:"):
        pytest.importorskip("runai_model_streamer_s3", reason="its part for S3 is not installed")
        monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    made = export(release, target)
    place = made.url.removeprefix("file://")
    files = streamer.list_safetensors(place)
    assert len(files) == 4
    found = {}
    with streamer.SafetensorsStreamer() as reading:
        reading.stream_files(files)
        for name, value in reading.get_tensors():
            found[name] = value.numpy().copy()
    stored = release.load()["model"]
    assert found.keys() == stored.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, np.asarray(stored[name]))


#: Runs `model_signing verify key` for several folders in one process: its start takes seconds.
_VERIFY = """
import sys
from click.testing import CliRunner
from model_signing._cli import main
public, *folders = sys.argv[1:]
for folder in folders:
    signature = ["--signature", f"{folder}/model.sig", "--public_key", public]
    done = CliRunner().invoke(main, ["verify", "key", folder, *signature])
    print(done.exit_code, done.output.replace(chr(10), " "))
"""


def openssf(public: Path, *folders: Path) -> list[str]:
    """Return what OpenSSF's own tool says of folders: its exit status, and what it prints."""
    pytest.importorskip("model_signing", reason="model-signing is not installed: scripts/setup dev")
    command = [sys.executable, "-c", _VERIFY, public, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.replace("\\", "").splitlines()


def ecdsa(folder: Path, name: str) -> SigningKey:
    source = write_key(folder, name, ec.generate_private_key(ec.SECP256R1()))
    return SigningKey.load(source, "ECDSA")


def test_the_tool_of_openssf_verifies_what_was_exported_with_a_key(
    release: Release, tmp_path: Path
) -> None:
    key, target = ecdsa(tmp_path, "team"), open_files(str(tmp_path / "out"))
    plain = export_release(release, target, _OPTIONS)
    folder = Path(plain.url.removeprefix("file://"))
    # A folder that was exported before is signed by what the registry has, not by what is there.
    shard = next(folder.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not export_release(release, target, _OPTIONS, key).is_new
    flipped = shutil.copytree(folder, tmp_path / "flipped")
    shard.write_bytes(data)
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    marker = renamed / "holdfast.json"
    marker.write_bytes(marker.read_bytes().replace(b"1.0.0", b"1.0.1"))
    before = (folder / "model.sig").read_bytes()
    assert not export_release(release, target, _OPTIONS, key).is_new
    assert (folder / "model.sig").read_bytes() == before
    with pytest.raises(Conflict, match="another signature"):
        export_release(release, target, _OPTIONS, ecdsa(tmp_path, "other"))
    (folder / "model.sig").write_bytes(b"[" * 100_000)
    with pytest.raises(Conflict, match="another signature"):
        export_release(release, target, _OPTIONS, key)
    (folder / "model.sig").write_bytes(before)
    whole, first, second = openssf(tmp_path / "trusted-team" / "team.pem", folder, flipped, renamed)
    assert whole.startswith("0 Verification succeeded")
    assert first.startswith("1 Verification failed")
    assert f"Hash mismatch for '{shard.name}'" in first
    assert second.startswith("1 Verification failed")
    assert "Hash mismatch for 'holdfast.json'" in second


def test_a_signature_is_there_before_the_marker(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = Files.write

    def noted(self: Files, path: str, parts: Iterable[bytes]) -> None:
        written.append(path)
        write(self, path, parts)

    monkeypatch.setattr(Files, "write", noted)
    export_release(release, open_files(str(tmp_path / "out")), _OPTIONS, ecdsa(tmp_path, "team"))
    assert [name.rpartition("/")[2] for name in written[-2:]] == ["model.sig", "holdfast.json"]
    # Of a release that was made of an exported folder, which has a marker of its own, too.
    (tmp_path / "model" / "holdfast.json").write_text('{"format": "holdfast.export/1"}')
    with holdfast.open(tmp_path / "reg") as reg:
        run = reg.create_run("again")
        state = holdfast.formats.read(tmp_path / "model").state
        release = run.releases.publish("1.0.0", run.save(state, step=1))
        written.clear()
        made = export_release(release, open_files(str(tmp_path / "out")), _OPTIONS)
    names = [name.rpartition("/")[2] for name in written]
    assert (names.count("holdfast.json"), names[-1]) == (1, "holdfast.json")
    assert "holdfast.json" not in json.loads(contents(made.url)["holdfast.json"])["files"]
