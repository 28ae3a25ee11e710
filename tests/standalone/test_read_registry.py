"""The independent reader: written from the specification, it reads what Holdfast wrote."""

import base64
import collections
import datetime as dt
import decimal
import fractions
import hashlib
import importlib.util
import json
import math
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import holdfast

ROOT = Path(__file__).parents[2]
READER = ROOT / "registry" / "standalone" / "read_registry.py"
GOLDEN = ROOT / "tests" / "golden"
KINDS = [
    "raw",
    "auto",
    "zstd",
    "lz4",
    "deltas",
    "pool",
    "streams",
    "sharded",
    "journaled",
    "signed",
]
IDS = json.loads((GOLDEN / "registries" / "v1" / "ids.json").read_text())


@pytest.fixture(autouse=True)
def no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HEADS", "0")


def outside(*arguments: object) -> str:
    """Run the reader as an archive's user would: a process of its own that finds no Holdfast."""
    command = [sys.executable, "-I", READER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inside() -> Any:
    """Load the reader as a module, to run it often."""
    spec = importlib.util.spec_from_file_location("read_registry", READER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def golden(name: str, folder: Path) -> Path:
    if name in ("v1", "v2"):
        return Path(shutil.copytree(GOLDEN / name / "registry", folder / name))
    with tarfile.open(GOLDEN / "registries" / "v1" / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def names(listing: str) -> dict[str, str]:
    """Return the refs of a listing with their ids."""
    rows = [line.split("\t") for line in listing.splitlines()]
    return {ref: digest for ref, digest in rows if len(digest) == 64}


def same(found: Any, value: Any, folder: Path) -> bool:
    """Return whether an extracted value is the one that Holdfast loads, bit for bit."""
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        import torch

        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return array(found["$t"], raw, str(value.dtype)[6:], list(value.shape), folder)
    match value:
        case np.ndarray():
            return array(found["$n"], value.tobytes(), str(value.dtype), list(value.shape), folder)
        case np.generic():
            return bool(found["$ns"] == [str(value.dtype), value.tobytes().hex()])
        case dict():
            tag = "$od" if isinstance(value, collections.OrderedDict) else "$d"
            pairs = found[tag] if tag in found else list(found.items())
            return len(pairs) == len(value) and all(
                same(key, k, folder) and same(one, v, folder)
                for (key, one), (k, v) in zip(pairs, value.items(), strict=True)
            )
        case tuple() | list():
            items = found["$tu"] if isinstance(value, tuple) else found
            return all(same(x, y, folder) for x, y in zip(items, value, strict=True))
        case bytes():
            return base64.b64decode(found["$b"]) == value
        case float():
            return struct.pack("<d", found) == struct.pack("<d", value)
        case int() if abs(value) > 2**53:
            return int(found["$i"], 16) == value
    return type(found) is type(value) and found == value


def array(about: Any, raw: bytes, dtype: str, shape: list[int], folder: Path) -> bool:
    assert [about["dtype"], about["shape"]] == [dtype, shape]
    file = folder / about["file"]
    if file.suffix == ".bin":
        return file.read_bytes() == raw
    read = np.load(file, allow_pickle=False)
    return bool(read.tobytes() == raw and list(read.shape) == shape and str(read.dtype) == dtype)


@pytest.mark.parametrize("name", [*KINDS, "v1", "v2"])
def test_it_reads_every_golden_registry(name: str, tmp_path: Path) -> None:
    folder = golden(name, tmp_path)
    found = names(outside(folder, "ls"))
    assert set(IDS.get(name, [])) <= set(found.values())
    assert outside(folder, "verify").startswith("ok: ")
    registry = holdfast.open(folder, read_only=True)
    reader = inside()
    for number, digest in enumerate(sorted(set(found.values()))):
        ref = next(ref for ref, one in found.items() if one == digest)
        at = tmp_path / digest[:12]
        if number == 0:  # one process shows that nothing else is needed
            outside(folder, "extract", ref, at)
        else:
            assert reader.main([str(folder), "extract", ref, str(at)]) == 0
        described = json.loads((at / "state.json").read_text())
        stored = registry.stored(ref)
        assert described["id"] == digest == stored.digest.hex()
        assert list(described["state"]) == list(stored.load())
        assert same(described["state"], dict(stored.load()), at), (name, ref)


def everything() -> dict[str, Any]:
    """A state with every type of the specification's closed table, and every way to store bytes."""
    import torch

    zone, nan = dt.timezone(dt.timedelta(hours=2), "X"), float("nan")
    rng = np.random.default_rng(1)
    eye = torch.eye(4)
    counted = collections.defaultdict(int, a=1)
    return {
        "plain": {"a": [None, True, 5, -(2**53), 2**70, -(2**53) - 1, 1.5, -0.0, "é\x01\x7f"]},
        "keys": {1: 2, (1, None): 3, None: 4, "$x": 5}, "odict": collections.OrderedDict(b=1, a=2),
        "texts": ["x" * 70_000, b"y" * 5000, b"ab", bytearray(b"c"), bytearray(5000)],
        "groups": [{3, 1, "a"}, frozenset({1}), collections.deque([1], 3), counted,
                   collections.Counter("aab")],
        "odd": [nan, math.inf, 1 + 2j, uuid.UUID(int=5), decimal.Decimal("1.5"), range(1, 5, 2),
                fractions.Fraction(2**70, 3), slice("a", None), ..., pathlib.PurePosixPath("a/b")],
        "dates": [dt.date(2024, 1, 2), dt.datetime(2024, 1, 2, 3, tzinfo=zone), zone,
                  dt.time(1, 2, 3, 4, fold=1), dt.timedelta(-1)],
        "numpy": [np.int64(3), np.float32(1.5), np.datetime64("2024-01-01"), np.dtype("<M8[ns]"),
                  np.array(["2024-01-01", "NaT"], "M8[D]"), np.zeros((0, 3)), np.array(3.0)],
        "torch": [torch.Size([1]), torch.float32, torch.device("cpu"), torch.__version__,
                  eye.to_sparse(), eye.to_sparse_csr(), eye.to_sparse_csc(),
                  eye.to_sparse_bsr((2, 2)), eye.to_sparse_bsc((2, 2)),
                  torch.arange(40).to(torch.bfloat16), torch.ones(9, dtype=torch.float8_e5m2)],
        "bulk": {str(np.dtype(kind)): (rng.normal(size=(5, 7, 1111)) * 9).astype(kind)
                 for kind in ("?", "i1", "u2", "i4", "f2", "f4", "f8", "c8", "c16")},
        "chunked": np.arange(1_800_000, dtype="f4").reshape(3, 600_000),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("compression", ["auto", "zstd", "lz4"])
def test_it_reads_every_type_codec_and_name(compression: Any, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    registry = holdfast.init(folder, compression=compression, keyframe_every=3)
    monitors = [
        holdfast.Monitor(metric="loss", mode="min"),
        holdfast.Monitor(metric="mu - 3*sigma + 0.5*x", mode="max", name="skill"),
    ]
    run = registry.create_run("a", monitor=monitors)
    state, saved = everything(), []
    for step in range(1, 6):
        state["bulk"]["float32"][0, step] += 1  # so that chunks become deltas
        metrics = {"loss": step % 3, "mu": step * 1.0, "sigma": 1.0, "x": 2.0}
        saved.append(run.save(state, step=step, metrics=metrics, meta={"a": (1, 2.5)}))
    run.pins.gates.set("last", saved[4])
    run.pins.tags.set("first", saved[0])
    run.pins.artifacts.set("seeds", {"s": np.arange(20)})
    for version, checkpoint in zip(("1.0.0", "1.1.0"), saved, strict=False):
        run.releases.publish(version, checkpoint, only="bulk")
    run.releases.rollback("1.0.0", "bad")
    run.retention.thin(saved[1], keep=["odd"])
    run.retention.evict(saved[3], "by hand")
    run.close()
    again = registry.run("a")
    again.restore(at=registry.checkpoint("a/main/step00000003"))
    again.save({"x": 1}, step=6)
    registry.fork("a/latest", "f")
    (tmp_path / "phases.toml").write_text(PHASES)
    phased = registry.create_run("p", preset=tmp_path / "phases.toml")
    for step, (phase, metrics) in enumerate([("1", {"loss": 1}), ("fine", {"acc": 2})]):
        phased.save({"x": step}, step=step, phase=phase, metrics=metrics)
    phased.phases.pivot("again")
    for name in ("hidden", "back"):
        dropped = registry.create_run(name)
        dropped.save({"x": name}, step=1)
        dropped.retention.drop("a mistake")
    registry.run("back").retention.undrop()
    reader = inside()
    found = names(outside(folder, "ls"))
    for ref, digest in found.items():
        assert registry.stored(ref).digest.hex() == digest, ref
    for ref in ("a/best/skill", "a/main/best", "a/releases/latest", "a/artifacts/seeds",
                "a/gates/last", "f/gates/last", "f/latest", "a/tags/first"):  # fmt: skip
        assert ref in found
    assert not {"a/main/step00000004", "a/main/step00000005"} & set(found)
    assert {ref for ref in found if ref.startswith("p/") and "best" in ref} == {
        "p/phase1/best", "p/phase1/best/loss"}  # fmt: skip
    assert "back/latest" in found
    assert "hidden/latest" not in found
    assert outside(folder, "verify").startswith("ok: 5 runs")
    assert reader.main([str(folder), "extract", "a/main/step3", str(tmp_path / "out")]) == 0
    described = json.loads((tmp_path / "out" / "state.json").read_text())
    assert described["meta"] == {"a": {"$tu": [1, 2.5]}}
    loaded = registry.checkpoint("a/main/step00000003").load()
    for name in ("plain", "keys", "odict", "bulk", "chunked"):
        assert same(described["state"][name], loaded[name], tmp_path / "out"), name
    tags = {key for node in walk(described["state"]) for key in node if key.startswith("$")}
    assert {tag[1:] for tag in tags} == reader.TAGS - {"ad"}
    assert reader.main([str(folder), "extract", "a/main/step2", str(tmp_path / "thin")]) == 0
    thin = json.loads((tmp_path / "thin" / "state.json").read_text())
    assert list(thin["state"]) == ["odd"]
    assert "bulk" in thin["given_up"]


def test_it_finds_what_a_commit_keeps_under_every_name(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    (tmp_path / "aside.toml").write_text(ASIDE)
    with holdfast.init(folder) as registry:
        run = registry.create_run("a", preset=tmp_path / "aside.toml")
        for step in (1, 2):
            run.save({"w": np.arange(step), "when": step}, step=step)
        first = run.checkpoints()[0]
        run.pins.gates.set("g", first)
        run.pins.artifacts.set("w", {"w": np.arange(1)})
        run.releases.publish("1.0.0", first)
        run.releases.publish("1.1.0", first, only="w")
        for number, path in enumerate(
            ("gates/g", "releases/1.0.0", "releases/1.1.0", "artifacts/w", "latest")
        ):
            outside(folder, "extract", f"a/{path}", tmp_path / str(number))
            found = json.loads((tmp_path / str(number) / "state.json").read_text())["state"]
            assert list(found) == list(registry.stored(f"a/{path}").load()), path


ASIDE = """
format = "holdfast.preset/1"
name = "aside"
about = "A key that differs between equal trainings"
commit_keys = ["when"]
"""


PHASES = """
format = "holdfast.preset/1"
name = "two"
about = "Two phases with monitors of their own"
phases = [
    { name = "1", monitors = [{ metric = "loss", mode = "min" }] },
    { name = "fine", monitors = [{ metric = "acc", mode = "max" }] },
]
"""


def walk(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, (dict, list)):
            yield from walk(one)


@pytest.mark.parametrize("name", ["v1", "deltas", "lz4", "sweeps"])
def test_it_refuses_one_changed_byte_in_each_kind_of_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = inside()
    if name == "sweeps":  # epochs and tables alone
        folder = golden("raw", tmp_path)
        for part in ("epochs", "sweeps"):
            shutil.copytree(GOLDEN / "sweeps" / part, folder / part)
    else:
        folder = golden(name, tmp_path)
    assert reader.main([str(folder), "verify"]) == 0
    first: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            parts = path.relative_to(folder).parts
            first[parts[0] if parts[0] != "runs" else parts[2]] = path
    for path in first.values():
        data = path.read_bytes()
        for at in sorted({0, len(data) // 2, len(data) - 70, len(data) - 1}):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            capsys.readouterr()
            assert reader.main([str(folder), "verify"]) in (6, 8), (path, at)
            said = capsys.readouterr()
            assert path.name in said.out + said.err
        path.write_bytes(b"")
        if path.parts[-2] != "active":  # markers are empty
            assert reader.main([str(folder), "verify"]) == 6, path
        path.unlink()
        if path.relative_to(folder).parts[0] in ("manifests", "placements", "packs"):
            assert reader.main([str(folder), "verify"]) == 6, path
        path.write_bytes(data)


def test_it_refuses_impossible_sizes_and_exchanged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, folder = inside(), golden("raw", tmp_path)
    key = next((folder / "placements").rglob("*.0"))
    hostile = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 1_500_000_000) + b"\x03\x00\x00"
    assert zstandard.frame_content_size(hostile) == 1_500_000_000
    key.write_bytes(hostile + hashlib.sha256(hostile).digest())
    assert reader.main([str(folder), "verify"]) == 6
    assert f"{key.name}: a frame claims 1500000000 bytes" in capsys.readouterr().out
    pack = next((folder / "packs").rglob("*.0"))
    data = pack.read_bytes()
    pack.write_bytes(data[:-48] + struct.pack("<Q", 2**62) + data[-40:])
    assert reader.main([str(folder), "verify"]) == 6
    assert f"{pack.name}: its table claims {2**62} bytes" in capsys.readouterr().out
    one, other = list((folder / "manifests").rglob("*.0"))[:2]
    one.write_bytes(other.read_bytes())  # whole, but another state
    assert reader.main([str(folder), "verify"]) == 6
    assert f"{one.name}: not the id of its name" in capsys.readouterr().out
    for status, arguments in ((2, []), (4, ["show", "run/main/step9"]), (4, ["show", "nobody"])):
        assert reader.main([str(folder), *arguments]) == status
    assert reader.main([str(tmp_path / "nothing"), "ls"]) == 4
    assert reader.main([str(folder), "extract", "run/latest", str(folder)]) == 3
    assert reader.main([str(folder), "extract", "run/latest", __file__]) == 3


def test_it_refuses_a_changed_history_and_an_unknown_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, folder = inside(), golden("raw", tmp_path)
    log = folder / "runs" / "run" / "log"
    for slot, old, new, status, text in (
        (3, b"checkpoint.add", b"checkpoint.new", 8, "the action 'checkpoint.new'"),
        (1, b'"step":1', b'"step":7', 6, f"{2:020}: the chain of commits is broken"),
    ):
        file = log / f"{slot:020}"
        body = file.read_bytes()[:-65].replace(old, new)
        file.write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")
        assert reader.main([str(folder), "ls"]) == status
        assert text in capsys.readouterr().err


def test_it_is_short_enough_to_be_read() -> None:
    assert len(READER.read_text().splitlines()) <= 600


def test_it_knows_what_the_specification_lists() -> None:
    reader = inside()
    spec = (ROOT / "docs" / "spec.md").read_text()

    def listed(section: str, header: str, column: int) -> set[str]:
        table = spec.split(section)[1].split(header)[1].split("\n\n")[0]
        rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ")]
        return {name for row in rows for name in re.findall(r"`([a-z0-9A-Z_.]+)`", row[column])}

    assert listed("## 8. The log", "| action | fields", 0) == reader.ACTIONS
    assert listed("## 4. Skeleton", "| tag | value", 0) == reader.TAGS
    assert listed("## 3. Manifest", "| bytes of an element", 1) == set(reader.DTYPES)
    for name in ("later", "owned"):
        for line in reader.json_lines((GOLDEN / name).read_bytes()):
            actions = {action["action"] for action in reader.canonical(line)["actions"]}
            assert actions <= reader.ACTIONS
