"""Small registries that would take gigabytes are refused before the memory is taken."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.backends import limits
from holdfast.backends.local.backend import LocalBackend
from holdfast.registry.errors import (
    BeyondLimit,
    Damaged,
    InvalidInput,
    Malformed,
    StorageError,
    UnsupportedValue,
)
from holdfast.registry.objects.framing import join_lines, split_lines, unwrap_frame, wrap_frame
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.pack import read_pack_table
from holdfast.registry.objects.placement import Placement
from holdfast.registry.objects.tensor_entry import TensorEntry
from holdfast.registry.pytree import flatten, unflatten_component
from holdfast.registry.values import canonical, parse_limits
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.parse_limits import MOST_EQUAL, KeyHashes
from tests.damage.bombs import ACTS, plant, read_apart, sealed

MIB = 2**20
#: Values of which each takes far more memory than bytes.
VALUES = (b"[]", b'{"":{}}', b'"ab"', b"1234567")


def repeated(value: bytes, count: int) -> bytes:
    return b"[%b]" % b",".join([value] * count)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, Digest]:
    """A registry whose newest manifest is 12 MiB of empty lists, in 2 kB."""
    folder = tmp_path_factory.mktemp("bomb") / "r"
    digest, data = sealed(repeated(b"[]", 4_000_000))
    assert len(data) < 2500  # and 330 MiB once it is parsed
    plant(folder, (digest, data))
    return folder, digest


@pytest.mark.xdist_group("planted")
@pytest.mark.parametrize("act", ACTS)
def test_a_manifest_of_a_thousand_times_its_size_is_refused_unparsed(act, planted, monkeypatch):
    folder, digest = planted
    monkeypatch.setenv(limits.VARIABLE, str(128 * MIB))
    grown, said = read_apart(folder, act)
    assert grown < 100
    assert f"{digest.hex()}.0: parsing it would take too much memory" in said
    if act != "verify":
        assert said.startswith("BeyondLimit ")
        assert limits.VARIABLE in said


@pytest.mark.parametrize("value", VALUES)
def test_values_are_weighed_by_what_they_take(value, monkeypatch):
    data = repeated(value, 100_000)
    tracemalloc.start()
    parsed = canonical.parse(data, where="x")
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parsed) == 100_000
    monkeypatch.setenv(limits.VARIABLE, str(taken))
    with pytest.raises(BeyondLimit, match="x: parsing it would take too much memory"):
        canonical.parse(data, where="x")


def test_no_text_makes_values_weigh_less():
    values = repeated(b"[]", 1000)
    for text in (rb"\":" * 1000, rb"\"" * 1000, b":" * 1000, b"\\\\" * 1000):
        together = b'["%b",%b]' % (text, values)
        assert parse_limits.json_bytes(together) > parse_limits.json_bytes(values)


def test_a_size_that_a_frame_only_claims_is_not_taken():
    claimed = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**50) + b"\x01\x00\x00"
    with pytest.raises(BeyondLimit, match=f"found about {2**50} bytes"):
        unwrap_frame(claimed + Digest.of(claimed), where="x")


def test_rows_of_a_placement_are_weighed(monkeypatch):
    count = 10_000
    header = {
        "extra": [],
        "format": "holdfast.placement/1",
        "manifest": "0" * 64,
        "packs": [["0" * 64, 0, 10]],
        "rows": count,
    }
    columns = [bytes(12 * count), b"\x01\0\0\0" * count, bytes(count), b"\xff" * (4 * count)]
    content = b"".join([canonical.encode(header), b"\n", *columns])
    data = wrap_frame(content)
    assert len(data) < 500
    assert len(Placement.decode(data, Digest.of(content), where="x").rows) == count
    monkeypatch.setenv(limits.VARIABLE, str(MIB))
    with pytest.raises(BeyondLimit, match=f"reading {count} rows"):
        Placement.decode(data, Digest.of(content), where="x")


def test_digests_of_a_list_are_weighed_before_the_list_is_read(tmp_path):
    tensor = canonical.encode([{"dtype": "uint8", "list": "0" * 64, "shape": [2**46]}])
    digest, data = sealed(b'{"t":0}', tensor)

    def listed(sound: Placement) -> tuple[Digest, bytes]:
        row = sound.rows[0]._replace(codec=1)
        made = Placement(digest, sound.packs, type(sound.rows)([row]))
        return made.digest, made.encode()

    plant(tmp_path / "r", (digest, data), listed)
    with holdfast.open(tmp_path / "r") as opened:
        found = opened.checkpoint("bomb/latest")
        with pytest.raises(BeyondLimit, match="reading its digest lists"):
            found.handle.reader.chunk_digests(next(found.manifest.tensors()))


def test_lines_are_weighed(monkeypatch):
    data = join_lines([b""] * 20_000)
    assert len(split_lines(data, where="x")) == 20_000
    monkeypatch.setenv(limits.VARIABLE, str(MIB))
    with pytest.raises(BeyondLimit, match="x: reading its lines"):
        split_lines(data, where="x")


def test_a_table_that_a_trailer_only_claims_is_not_read():
    claimed = struct.pack("<Q32s8s", 2**40, bytes(32), b"HFPACK1\n")

    def read(start: int, stop: int) -> bytes:
        assert stop - start <= MIB
        return bytes(stop - start - len(claimed)) + claimed

    with pytest.raises(BeyondLimit, match="reading its table"):
        read_pack_table(read, 2**41, Digest(bytes(32)), where="x")
    with pytest.raises(Damaged):
        read_pack_table(read, 2**39, Digest(bytes(32)), where="x")


def test_a_file_without_end_is_not_read_as_a_whole(tmp_path):
    with holdfast.init(tmp_path / "r", skip_race_probe=True) as opened:
        opened.create_run("run")
    slot = tmp_path / "r" / "runs" / "run" / "log" / f"{1:020}"
    slot.touch()
    os.truncate(slot, 2**42)  # takes no space
    with holdfast.open(tmp_path / "r") as opened, pytest.raises(StorageError) as caught:
        opened.run("run")
    assert "too long to be read as a whole" in str(caught.value)
    assert LocalBackend(tmp_path / "r").stat(f"runs/run/log/{1:020}").size_bytes == 2**42


def test_bombs_do_not_add_up(tmp_path, monkeypatch):
    """A handle keeps the newest manifest, and others only while they are short."""
    with holdfast.init(tmp_path / "r", skip_race_probe=True) as opened:
        run = opened.create_run("run")
        for step in range(4):
            run.save({"m": ["x" * 60_000] * 5, "step": step}, step=step)
    monkeypatch.setattr("holdfast.registry.store.store._KEPT_BYTES", 700_000)
    with holdfast.open(tmp_path / "r") as opened:
        for found in opened.run("run").checkpoints():
            assert found.manifest.content_bytes > 300_000
        assert len(opened.handle.store._manifests) == 2


def test_what_is_regular_is_no_bomb(tmp_path):
    """20,000 equal counters are legal, however short they are stored."""
    state = {"m": {"state": {i: {"step": np.float32(7), "at": 7} for i in range(10_000)}}}
    state["n"] = {str(i): np.full((), 7, np.float32) for i in range(10_000)}
    with holdfast.init(tmp_path / "r", skip_race_probe=True) as opened:
        saved = opened.create_run("run").save(state, step=1)
        content = saved.manifest.content_bytes
    (file,) = (tmp_path / "r" / "manifests").rglob("*.0")
    assert content > 30 * file.stat().st_size
    with holdfast.open(tmp_path / "r") as opened:
        loaded = opened.checkpoint("run/latest").load()
        assert loaded["m"] == state["m"]
        assert all(array == 7 for array in loaded["n"].values())


def test_a_manifest_of_a_million_tensors_is_within_the_default():
    entry = canonical.encode(
        TensorEntry("bfloat16", (4096, 4096), chunks=(Digest(bytes(32)),) * 8).to_json()
    )
    assert 10**5 * 8 * parse_limits.ROW_BYTES < limits.DEFAULT_BYTES
    tensors = repeated(entry, 10**5)
    parse_limits.check_json(tensors, where="100,000 tensors of 32 MiB")
    small = canonical.encode(TensorEntry("float32", (256,), chunks=(Digest(bytes(32)),)).to_json())
    named = b",".join(b'["layer.%d.weight",{"t":%d}]' % (i, i) for i in range(10**6))
    body = b'{"skeleton":{"d":[%b]},"tensors":%b}' % (named, repeated(small, 10**6))
    parse_limits.check_json(body, where="a million tensors")


def test_equal_types_and_shapes_of_a_manifest_are_there_once():
    one = TensorEntry("float32", (1000,), chunks=(Digest(bytes(32)),))
    manifest = Manifest("dict", {"m": Component.build([{"t": 0}, {"t": 1}], [one, one])})
    first, second = Manifest.decode(manifest.encode(), manifest.digest, where="x").tensors()
    assert first.shape is second.shape
    assert first.dtype is second.dtype


LONG, TENSORS = "k" * 500_000, 500


def test_paths_of_a_manifest_are_counted_before_they_are_spelled(tmp_path, monkeypatch):
    """A long key above hundreds of tensors would be spelled for each of them."""
    monkeypatch.setenv(limits.VARIABLE, str(64 * MIB))
    skeleton = {"d": [[LONG, {"d": [[str(i), {"t": i}] for i in range(TENSORS)]}]]}
    entry = TensorEntry("uint8", (1,), inline=b"a").to_json()
    plant(tmp_path / "r", sealed(canonical.encode(skeleton), canonical.encode([entry] * TENSORS)))
    grown, said = read_apart(tmp_path / "r", "tensors")
    assert grown < 100
    assert "BeyondLimit " in said
    assert "spelling the paths in it would take too much memory" in said
    state = {"m": {LONG: {str(i): np.zeros(1) for i in range(TENSORS)}}}
    with holdfast.init(tmp_path / "s", skip_race_probe=True) as opened:
        run = opened.create_run("run")
        with pytest.raises(InvalidInput, match="spelling the paths of its tensors"):
            run.save(state, step=1)
        assert not list((tmp_path / "s").rglob("*.pack"))
        plain = {"m": {LONG: dict.fromkeys(range(10_000), 0), "w": np.zeros(1)}}
        assert run.save(plain, step=1).load()["m"][LONG] == plain["m"][LONG]


EQUAL = {
    "int": lambda k: k * (2**61 - 1),
    "complex": lambda k: complex(-1000003 * k, k),
    "tuple": lambda k: (0, k * (2**61 - 1)),
    "fraction": lambda k: Fraction(k * (2**61 - 1), 3),
}


@pytest.mark.parametrize("kind", EQUAL)
@pytest.mark.parametrize(
    "container", [dict.fromkeys, OrderedDict.fromkeys, Counter, set, frozenset]
)
def test_keys_of_one_hash_are_refused_in_both_directions(kind, container, monkeypatch):
    keys = [EQUAL[kind](k) for k in range(1, MOST_EQUAL + 2)]
    few, many = container(keys[:-1]), container(keys)
    (part,) = flatten({"m": few}).components
    assert unflatten_component(part.skeleton, ()) == few
    with pytest.raises(UnsupportedValue, match="with the same hash"):
        flatten({"m": many})
    with monkeypatch.context() as patch:
        patch.setattr(KeyHashes, "admits", lambda self, key: True)
        (part,) = flatten({"m": many}).components
    with pytest.raises(Malformed, match="with the same hash"):
        unflatten_component(part.skeleton, ())


def test_keys_that_share_a_hash_by_chance_are_legal():
    """-1 and -2 have one hash, so tuples of them meet in pairs."""
    grid = {(x, y): 0 for x in range(-40, 40) for y in range(-40, 40)}
    (part,) = flatten({"m": grid}).components
    assert unflatten_component(part.skeleton, ()) == grid


def test_a_deque_weighs_what_it_takes(monkeypatch):
    data = repeated(b'{"deque":[null,[]]}', 20_000)
    tracemalloc.start()
    found = unflatten_component(canonical.parse(data, where="x"), ())
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 20_000
    assert parse_limits.json_bytes(data) > taken
