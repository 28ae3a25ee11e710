"""The reader of torch files gives what torch itself reads, bit for bit, and is never lured."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.registry import formats, pytree
from holdfast.registry.errors import InvalidInput, UnsupportedValue
from tests.support.foreign import Calls, foreign
from tests.support.states import same

FORMS = ["zip", "old"]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]

LEGACY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of new element types


def saved(path: Path, value: Any, form: str = "zip", **options: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=form == "zip", **options)
    return path


def of_dtype(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.arange(24 * size, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    flat = raw.view(dtype)
    square = flat.reshape(2, 3, 4)
    return {
        "whole": square,
        "transposed": square.transpose(0, 2),
        "part": square[:, 1:, ::2],
        "expanded": square[:1].expand(5, 3, 4),
        "scalar": flat[5],
        "empty": flat[:0].reshape(0, 3),
    }


def bits(value: Any) -> Any:
    """Return a value whose tensors are bytes."""
    if isinstance(value, torch.Tensor):
        data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), data.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("form", FORMS)
def test_element_types_and_views(form: str, tmp_path: Path) -> None:
    # In the old form torch itself cannot read the types that have no storage of their own.
    some = [one for one in DTYPES if form == "zip" or one in LEGACY]
    state = {str(dtype): of_dtype(dtype) for dtype in some}
    path = saved(tmp_path / "x.pt", state, form)
    assert formats.detect(path) == "torch"
    expected = bits(torch.load(path, weights_only=True))
    assert bits(formats.read(path).state) == expected
    assert formats.validate(path) == []
    headers = {
        name: (f"torch.{one.dtype}", one.shape)
        for name, one in formats.inspect(path).tensors.items()
    }
    assert headers == {
        f"{dtype}/{name}": one[:2] for dtype, part in expected.items() for name, one in part.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_one_storage_are_read_once(form: str, tmp_path: Path) -> None:
    tied = torch.randn(64, 64)
    path = saved(tmp_path / "x.pt", {"a": tied, "b": tied, "c": tied[3:]}, form)
    found: Any = formats.read(path, portable=True).state
    held = {np.frombuffer(one.data, np.uint8).ctypes.data for one in found.values()}
    assert held == {min(held), min(held) + 3 * 64 * 4}
    assert found["c"].data.tobytes() == tied[3:].numpy().tobytes()
    found = formats.read(path).state
    assert found["a"].data_ptr() == found["b"].data_ptr()  # as torch itself reads it
    assert torch.equal(found["c"], tied[3:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values(form: str, protocol: int, tmp_path: Path) -> None:
    metadata: Any = nn.BatchNorm1d(3).state_dict()
    value = {
        "metadata": metadata,
        "nested": {"list": [1, -5, 2**70, None, True, 2.5, "\u00e4", b"\xff"], "tuple": ((), (1,))},
        3: OrderedDict(x=1),
        "sets": [{1, 2}, frozenset({"a"}), set()],
        "counter": Counter("aab"),
        "default": defaultdict(list, {"a": [1]}),
        "factories": [
            defaultdict(kind) for kind in (bool, bytes, dict, float, int, list, set, str, tuple)
        ],
        "deque": deque([1, 2], 5),
        "complex": 1 - 2j,
        "bytes": bytearray(b"abc"),
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "times": [
            datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC),
            datetime(2024, 5, 6, tzinfo=timezone(timedelta(hours=2), "x")),
            date(2020, 1, 2),
            time(1, 2, 3),
            timedelta(days=-1, seconds=5),
        ],
        "paths": [Path("/a/b"), PurePosixPath("c"), PureWindowsPath("d/e")],
        "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.dtype("f4"), np.dtype(">i2")],
        "arrays": [
            np.arange(6).reshape(2, 3),
            np.asfortranarray(np.ones((2, 3))),
            np.array([1, 2], "M8[ns]"),
            np.empty((0, 4), np.float16),
        ],
        "version": torch.__version__,
    }
    path = saved(tmp_path / "x.pt", {"all": value}, form, pickle_protocol=protocol)
    found = formats.read(path).state["all"]
    assert same(found, torch.load(path, weights_only=False)["all"])
    assert found["metadata"]._metadata == metadata._metadata
    assert type(found["version"]) is type(torch.__version__)


def test_big_endian_arrays_become_native(tmp_path: Path) -> None:
    dtype = np.dtype(">i4")  # the second array takes it from the memo, after it was finished
    state = {"a": np.arange(5, dtype=dtype), "b": np.arange(3, dtype=dtype)}
    found = formats.read(saved(tmp_path / "x.pt", {**state, "s": np.array(7, ">f8")[()]})).state
    for name, array in state.items():
        assert found[name].tolist() == array.tolist()
        assert found[name].dtype == np.int32
    assert found["s"] == 7


@pytest.mark.parametrize("form", FORMS)
def test_parameters_sparse_tensors_and_flags(form: str, tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    tagged = torch.ones(2)
    tagged.note = "x"  # type: ignore[attr-defined]
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    state = {
        "parameter": nn.Parameter(torch.ones(3)),
        "conjugate": z.conj(),
        "negative": z.clone().conj().imag,
        "tagged": tagged,
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
    }
    path = saved(tmp_path / "x.pt", state, form)
    found = formats.read(path).state
    expected = torch.load(path, weights_only=True)
    for name in ("parameter", "conjugate", "negative", "tagged"):
        assert bits(found[name]) == bits(expected[name])
    for name in ("coo", "csr", "csc"):
        assert found[name].layout is expected[name].layout
        assert torch.equal(found[name].to_dense(), expected[name].to_dense())
    assert formats.inspect(path).tensors["csr/col_indices"].dtype == "int64"


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (quantized, "a quantized"),
        (lambda: torch.empty(3, device="meta"), "a meta tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor"),
        (lambda: np.array([{}]), "array of objects"),
        (lambda: np.random.default_rng(3), "numpy"),
    ],
)
def test_values_that_no_checkpoint_holds(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "x.pt", {"x": make()})
    with pytest.raises(UnsupportedValue, match=message):
        formats.read(path)


def test_the_random_state_of_the_hf_trainer(tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    found = formats.read(saved(tmp_path / "rng_state.pth", state)).state
    assert same(found, state)
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.random.set_rng_state(found["cpu"])


def test_optimizers_in_the_old_form(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS):
        optimizer = kind(model.parameters(), lr=0.1)

        def closure(own: Any = optimizer) -> torch.Tensor:
            own.zero_grad()
            loss = model(torch.ones(3, 5)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        path = saved(
            tmp_path / "x.pt", {"o": optimizer.state_dict(), "m": model.state_dict()}, "old"
        )
        assert same(formats.read(path).state, torch.load(path, weights_only=True))


def test_big_endian_files(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"f": torch.arange(3.0), "z": torch.tensor([1 + 2j])})
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if "/data/" in name:
                data = np.frombuffer(data, ">f4").astype("<f4").tobytes()
            archive.writestr(name, b"big" if name.endswith("byteorder") else data)
    assert bits(formats.read(path).state) == bits(torch.load(path, weights_only=True))
    assert formats.read(path).state["f"].tolist() == [0, 1, 2]


def test_archives_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "x.pt", {"w": torch.arange(4.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert formats.read(path).state["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({0: torch.ones(1)}, "top-level keys"),
        ({"a": np.array(["text"])}, "string array"),
        ({"a": torch.ones(1).untyped_storage()}, "a storage without a tensor"),
        (torch.ones(1), "found a tensor"),
    ],
)
def test_a_file_that_no_run_can_store_is_not_valid(value: Any, said: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", value)
    (line,) = formats.validate(path)
    assert said in line
    with pytest.raises(InvalidInput, match=said):
        formats.read(path)


def test_every_damaged_storage_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": torch.full((99,), 1.5), "b": torch.full((99,), 2.5)})
    data = bytearray(path.read_bytes())
    for value in (1.5, 2.5):
        data[data.index(np.full(9, value, np.float32).tobytes())] ^= 1
    path.write_bytes(data)
    found = formats.validate(path)
    assert len(found) == 2
    assert all("CRC-32" in line for line in found)
    with pytest.raises(InvalidInput, match="damaged data"):
        formats.read(path)
    assert list(formats.inspect(path).tensors) == ["a", "b"]  # no data is read for it


def pickled(path: Path, value: Any) -> Path:
    """Write an archive with a pickle that torch would not write."""
    with zipfile.ZipFile(saved(path, {"w": torch.ones(8)})) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    file = io.BytesIO()
    _StoragePickler(file, 2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, file.getvalue() if name.endswith("data.pkl") else data)
    return path


class Storage:
    """Pickles as the storage of the file, which has 8 elements."""

    def __init__(self, count: int = 8) -> None:
        self.count = count


class _StoragePickler(pickle.Pickler):
    def persistent_id(self, one: Any) -> Any:
        if not isinstance(one, Storage):
            return None
        return ("storage", torch.FloatStorage, "0", "cpu", one.count)


def tensor(*arguments: Any) -> Calls:
    return Calls(torch._utils._rebuild_tensor_v2, *arguments)


@pytest.mark.parametrize(
    "value",
    [
        tensor(Storage(), 0, (9,), (1,), False, OrderedDict()),  # beyond its storage
        tensor(Storage(), 1, (8,), (1,), False, OrderedDict()),
        tensor(Storage(), 0, (2, 2), (8, 1), False, OrderedDict()),
        tensor(Storage(), -1, (2,), (1,), False, OrderedDict()),
        tensor(Storage(), 0, (2,), (-1,), False, OrderedDict()),
        tensor(Storage(), 0, (2, 2), (1,), False, OrderedDict()),
        tensor(Storage(), 0, (0, 2**62, 2**62), (1, 1, 1), False, OrderedDict()),
        tensor(Storage(), 0, (True,), (1,), False, OrderedDict()),
        tensor(Storage(), 0, (2**40, 2**40), (0, 0), False, OrderedDict()),
        tensor(Storage(), 0, (1,) * 65, (1,) * 65, False, OrderedDict()),
        tensor(Storage(9), 0, (1,), (1,), False, OrderedDict()),  # another length
        tensor(Storage(2**61), 0, (1,), (1,), False, OrderedDict()),
        tensor("x", 0, (1,), (1,), False, OrderedDict()),
        Calls(torch.device, "no such device"),
        Calls(torch.Size, ["x"]),
        Calls(OrderedDict, [[("x",) * 2, 1, 2]]),
        Calls(deque, [1], -5),
        Calls(np.dtype, "f99999"),
        Calls(datetime, b"\xff" * 10),
        Calls(timedelta, 10**30),
    ],
)
def test_values_that_lie(value: Any, tmp_path: Path) -> None:
    path = pickled(tmp_path / "x.pt", {"w": value})
    with pytest.raises(InvalidInput):
        formats.read(path)
    assert formats.validate(path)


def test_calls_that_copy_one_value_often_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MAX_RECORD_BYTES", str(2**20))
    many = list(range(1000))
    path = pickled(tmp_path / "x.pt", {"x": [Calls(deque, many) for _ in range(1000)]})
    with pytest.raises(InvalidInput, match="too much memory"):
        formats.read(path)


def test_the_old_form_with_more_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"w": torch.ones(3)}, "old")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InvalidInput, match="do not end with the file"):
        formats.read(path)


PROGRAM = """
import sys
sys.modules["torch"] = None
from holdfast.registry import formats
found = formats.read(sys.argv[1], portable=True).state
print(found["w"].dtype, found["w"].shape, bytes(found["w"].data).hex())
"""


def test_without_torch(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"w": torch.ones(1, 2, dtype=torch.bfloat16), "epoch": 1})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["bfloat16", "(1,", "2)", "803f803f"], done.stderr


def test_files_of_the_sample_of_adr_004() -> None:
    folder = foreign("adr") / "checkpoints"
    files = [path for path in folder.rglob("*.pt") if path.name != "latest.pt"]
    assert files
    for path in files:
        assert bits(formats.read(path).state) == bits(torch.load(path, weights_only=False))


def test_a_version_of_torch_comes_back_as_one_and_is_text_in_a_file(tmp_path: Path) -> None:
    state = {"metadata": {"pytorch_version": torch.__version__}, "w": torch.ones(2)}
    flat = pytree.flatten(state)
    assert flat.components[0].skeleton == {
        "d": [["pytorch_version", {"tver": str(torch.__version__)}]]
    }
    formats.write(tmp_path / "x.pt", state)
    found = torch.load(tmp_path / "x.pt", weights_only=True)["metadata"]["pytorch_version"]
    assert found == str(torch.__version__)
    assert type(found) is str


def test_nothing_is_mapped_or_run(tmp_path: Path) -> None:
    path = pickled(tmp_path / "x.pt", {"x": Calls(os.mkdir, str(tmp_path / "made"))})
    with pytest.raises(UnsupportedValue, match="mkdir"):
        formats.inspect(path)
    assert not (tmp_path / "made").exists()
