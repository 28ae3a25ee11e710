"""`verify(decode=True)`: what a writer encoded wrongly is found, and whom it costs what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Retention, Storing
from holdfast.registry.errors import IntegrityError
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects import codecs
from holdfast.registry.store.chunk_cache import ChunkCache
from tests.support.commands import invoke
from tests.support.faults import Hooked, flip
from tests.support.states import same
from tests.support.stores import contents, new_backend, packs_of, small_grid

DELTAS = {"storing": Storing(compression="zstd", keyframe_every=8)}


def state(i: int) -> dict:
    w = np.repeat(np.arange(3000, dtype=np.int32), 10)
    w[i * 7 : i * 7 + 3] = -i
    return {"m": {"w": w, "b": np.zeros(3000, np.int32) + i}}


class Wrong:
    """Compresses other bytes than it is given, as one does whose caller changes them meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self._encode = codecs.encode
        patch.setattr(codecs, "encode", self)

    def __call__(self, data, item_bytes, codec):
        if self.is_on:
            data = bytearray(data)
            data[0] ^= 1
        return self._encode(data, item_bytes, codec)


@pytest.fixture
def wrong(monkeypatch) -> Wrong:
    return Wrong(monkeypatch)


@pytest.mark.parametrize("how", [{"storing": Storing(compression="lz4")}, DELTAS])
def test_what_was_encoded_wrongly_is_found(how, wrong, reg, backend):
    run = reg.create_run("run")
    saved = [run.save(state(1), step=1, **how)]
    wrong.is_on = True
    saved.append(run.save(state(2), step=2, **how))
    wrong.is_on = False
    saved += [run.save(state(step), step=step, **how) for step in (3, 4)]
    assert reg.verify(deep=True).ok
    report = reg.verify(decode=True)
    assert not report.ok
    lost = set()
    for checkpoint in open_on(backend).run("run").checkpoints():
        try:
            assert same(checkpoint.load(), state(checkpoint.step))
        except IntegrityError:
            lost.add(checkpoint.ref)
    assert saved[0].step == 1
    assert saved[1].ref in lost
    assert saved[0].ref not in lost
    assert lost <= {ref for finding in report.findings for ref in finding.affects}
    packs = {finding.where for finding in report.findings}
    assert {finding.kind for finding in report.findings} == {"pack"}
    assert packs & set(packs_of(saved[1]))
    assert packs.isdisjoint(packs_of(saved[0]))
    assert all("mirrors have the same" in finding.advice for finding in report.findings)


def test_what_it_advises_helps(wrong, reg, backend, open_registry):
    run = reg.create_run("run")
    wrong.is_on = True
    run.save(state(1), step=1, storing=Storing(compression="zstd"))
    wrong.is_on = False
    assert not _loads(
        run.save(state(1), step=2, storing=Storing(compression="zstd"))
    )  # the run builds on it
    (finding,) = reg.verify(decode=True).findings
    assert finding.advice.endswith("Save the same states again into a new run.")
    again = open_registry(backend).create_run("again")
    assert _loads(again.save(state(1), step=1, storing=Storing(compression="zstd")))
    run.retention.drop("wrong bytes", now=True)
    assert open_registry(backend).verify(decode=True).ok


def _loads(checkpoint) -> bool:
    try:
        return same(checkpoint.load(), state(1))
    except IntegrityError:
        return False


def test_each_chunk_is_decoded_once_and_counted(reg, backend):
    with small_grid(4096):
        run, other = reg.create_run("run"), reg.create_run("other")
        for step in range(1, 6):
            run.save(state(step), step=step, **DELTAS)
            other.save(state(step), step=step, **DELTAS)
        report = reg.verify(decode=True)
        assert report.ok
        tables = [
            reg.handle.store.table(pack)
            for ck in run.checkpoints()
            for pack in ck.handle.reader.placement.packs
        ]
        encoded = {entry.digest for table in tables for entry in table if entry.codec != "raw"}
        assert any(entry.base for table in tables for entry in table)
        assert report.data.chunks_decoded == len(encoded) > 10
    assert reg.verify(deep=True).data.chunks_decoded is None
    assert reg.verify().data is None


def test_a_chunk_cache_hides_nothing(wrong, tmp_path: Path):
    backend = new_backend()
    with open_on(backend, cache=ChunkCache(tmp_path)) as reg:
        run = reg.create_run("run")
        wrong.is_on = True
        checkpoint = run.save(state(1), step=1, **DELTAS)
        assert _loads(checkpoint)  # out of the cache, which was offered what was saved
        assert not reg.verify(decode=True).ok


def test_damage_is_told_as_damage(reg, backend):
    checkpoint = reg.create_run("run").save(state(1), step=1, storing=Storing(compression="zstd"))
    flip(backend, packs_of(checkpoint)[0])
    (finding,) = reg.verify(decode=True).findings
    assert "mirrors have the same" not in finding.advice


def test_a_pack_that_is_collected_meanwhile_is_no_finding(open_registry):
    backend = new_backend()
    store = Hooked(backend)
    reg = open_registry(store)
    run = reg.create_run("run")
    for step in (1, 2):
        run.save(state(step), step=step, storing=Storing(compression="zstd"))
    (pack,) = packs_of(next(iter(run.checkpoints())))
    reads: list[str] = []

    def before(method: str, key: str) -> None:
        if method == "get" and key == pack:
            reads.append(key)
            if len(reads) == 2:  # the first read was the whole of it
                other = open_registry(backend)
                other.run("run").retention.prune(Retention(last=1))
                other.gc(grace_s=0)

    store.before = before
    assert reg.verify(decode=True).ok
    assert len(reads) > 1
    assert pack not in contents(store)


def test_the_command_tells_of_it(wrong, tmp_path: Path):
    with holdfast.init(tmp_path / "r") as reg:
        run = reg.create_run("run")
        run.save(state(1), step=1, storing=Storing(compression="zstd"))
        command = ["verify", "-r", str(tmp_path / "r"), "--decode"]
        sound = invoke(*command)
        assert sound.exit_code == 0
        assert "2 compressed chunks decoded and hashed." in sound.output
        wrong.is_on = True
        run.save(state(2), step=2, storing=Storing(compression="zstd"))
    found = invoke(*command)
    assert found.exit_code == 6
    assert "its bytes do not hash to its digest" in found.output
