"""Every stored registry of the past is read, continued, collected and copied by today's code."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast.registry.objects.codecs import codec_name
from tests.golden.make_registries import REGISTRIES, STEPS, state
from tests.support.commands import invoke
from tests.support.keys import GOLDEN_KEY, write_key
from tests.support.sameness import assert_same

FOLDER = Path(__file__).parent / "registries"
VERSIONS = sorted(path.name for path in FOLDER.iterdir())
#: The codec of each compressed registry.
CODECS = {"auto": "blosc-zstd", "zstd": "blosc-zstd", "lz4": "blosc-lz4", "deltas": "blosc-zstd"}


def unpacked(version: str, name: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / version / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def test_every_kind_of_registry_is_kept() -> None:
    for version in VERSIONS:
        kept = {path.name.removesuffix(".tar.gz") for path in (FOLDER / version).glob("*.gz")}
        assert kept == set(REGISTRIES)


@pytest.mark.parametrize("name", REGISTRIES)
def test_the_page_has_what_a_reader_says_of_each(name: str, tmp_path: Path) -> None:
    page = (FOLDER.parents[2] / "docs" / "compatibility.md").read_text()
    (listed,) = re.findall(rf"^\| `{name}` \| [^|]+ \| (.+) \|$", page, re.M)
    registry = unpacked("v1", name, tmp_path)
    said = invoke("verify", "--deep", "-r", registry)
    assert (said.output, said.exit_code) == (f"{listed}\n", 0)
    if name == "raw":
        assert "the registry asks for 1;" in invoke("doctor", "-r", registry).output


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", REGISTRIES)
def test_a_stored_registry_lives_on(version: str, name: str, tmp_path: Path) -> None:
    ids = json.loads((FOLDER / version / "ids.json").read_text())[name]
    with holdfast.open(unpacked(version, name, tmp_path)) as reg:
        assert reg.verify(deep=True).findings == ()
        run = reg.run("run")
        assert [one.digest.hex() for one in run.checkpoints()] == ids
        for step, one in zip(STEPS, run.checkpoints(), strict=True):
            assert one.step == step
            assert_same(one.load(), state(step))
        placement = run.checkpoints()[-1].handle.reader.placement
        codecs = {codec_name(one, where=name) for one in placement.rows.codecs}
        assert codecs == {"raw", CODECS.get(name, "raw")}
        assert placement.rows.has_deltas == (name == "deltas")
        resumed = run.restore()
        assert resumed is not None
        assert_same(resumed.state, state(STEPS[-1]))
        later = run.save(state(STEPS[-1] + 1), step=STEPS[-1] + 1)
        run.retention.evict(run.checkpoints()[0], reason="to collect something")
        assert reg.gc(grace_s=0).deleted
        assert reg.verify(deep=True).findings == ()
        with holdfast.init(tmp_path / "mirror", skip_race_probe=True) as mirror:
            holdfast.sync(reg, mirror)
            assert_same(mirror.checkpoint(f"run/{later.digest.hex()}").load(), later.load())


def test_the_registry_of_auto_has_a_frame_whose_blocks_are_split(tmp_path: Path) -> None:
    with holdfast.open(unpacked("v1", "auto", tmp_path)) as reg:
        placement = reg.run("run").checkpoints()[0].handle.reader.placement
        row = next(row for row in placement.rows if row.codec)
        pack = reg.handle.store.backend.get(str(placement.packs[row.pack].key))
    assert pack[row.offset + 2] == 0x81  # shuffled, split, zstd


def test_a_stored_signature_holds_and_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    source = write_key(tmp_path, "golden", Ed25519PrivateKey.from_private_bytes(GOLDEN_KEY))
    with holdfast.open(unpacked("v1", "signed", tmp_path)) as reg:
        report = reg.verify(signed=tmp_path / "trusted-golden")
        assert [(one.name, one.commits, one.of) for one in report.vouched] == [("golden", 4, 4)]
        assert (report.findings, reg.handle.store.config.min_writer) == ((), 1)
        for path in (tmp_path / "signed" / "signatures" / "run").iterdir():
            before = path.read_bytes()
            if path.name.startswith("00000000000000000003."):
                path.unlink()
                assert reg.sign(source)[0].is_new
            assert path.read_bytes() == before
