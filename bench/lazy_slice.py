"""One slice of one tensor out of a whole checkpoint: what is read for it, and how long it takes.

A hundredth of the rows of one large tensor, other rows in every round. Each contender reads in a
process of its own, with its files dropped from the page cache first; what it read is held against
the state. All meters are the kernel's, the same for everybody, and count from before the files are
opened: bytes from the disk (`read_bytes`, read-ahead included) and bytes asked for (`rchar`); a
mapping asks for nothing. Holdfast's bytes are counted at its backend, too.

    process   from starting the interpreter until it has ended
    imports   of the libraries, and of torch, which everybody's training has
    read      opening and reading, after the imports
    CPU       of that, all threads: other jobs of the machine disturb it less
    of it     the reading alone, where the tensor has been opened; for OCDBT and icechunk, which
              open lazily, metadata is a part of it
    again     another slice of the same size, by what is open already; other chunks, as cold

    python lazy_slice.py [--workload lm] [--rounds N] [--scale S] [--dir FOLDER] [--warm]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

#: Size of a chunk, for peers that have an option for it: Holdfast's.
CHUNK_BYTES = 4 * 2**20
TENSOR = {"lm": ("token_embedding.weight",), "hydra": ("blocks.1.conv1.weight",)}
RAW, ZSTD, DELTA = "holdfast raw", "holdfast zstd", "holdfast deltas"
OCDBT = "tensorstore OCDBT"
#: The highest ratio of Holdfast's reading time to that of OCDBT, which verifies nothing.
GOAL = 1.0

Figures = dict[str, Any]
#: Opens the tensor of this name; what it returns takes slices.
Open = Callable[[Path, str], Any]


# Reading; nothing heavy is imported before `main` has timed it


class _Plain:
    def __init__(self, at: Path, name: str) -> None:
        entry = json.loads((at / "plain.json").read_text())[name]
        self._file = (at / "plain").open("rb", buffering=0)
        self._offset, self._dtype, self._shape = entry["offset"], entry["dtype"], entry["shape"]

    def __getitem__(self, rows: slice) -> Any:
        import numpy as np

        dtype = np.dtype(self._dtype)
        row_bytes = dtype.itemsize * int(np.prod(self._shape[1:]))
        self._file.seek(self._offset + rows.start * row_bytes)
        data = self._file.read((rows.stop - rows.start) * row_bytes)
        return np.frombuffer(data, dtype).reshape(-1, *self._shape[1:])


def _holdfast(folder: str) -> Open:
    def opened(at: Path, name: str) -> Any:
        import holdfast

        return holdfast.open(at / folder, read_only=True).checkpoint("run/latest")[f"model/{name}"]

    return opened


def _safetensors(at: Path, name: str) -> Any:
    from safetensors import safe_open

    return safe_open(at / "state.safetensors", framework="pt").get_slice(f"model.{name}")


def _torch(at: Path, name: str) -> Any:
    import torch

    return torch.load(at / "state.pt", mmap=True, weights_only=True)["model"][name]


def _icechunk(at: Path, name: str) -> Any:
    import icechunk
    import zarr

    storage = icechunk.local_filesystem_storage(str(at / "icechunk"))
    session = icechunk.Repository.open(storage).readonly_session("main")
    return zarr.open_array(session.store, path=f"model/{name}", mode="r")


def _ocdbt_spec(at: Path, name: str) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{at}/ocdbt/", "path": f"model/{name}/"},
    }


class _Ocdbt:
    def __init__(self, at: Path, name: str) -> None:
        import tensorstore

        self._array = tensorstore.open(_ocdbt_spec(at, name)).result()

    def __getitem__(self, rows: slice) -> Any:
        return self._array[rows].read().result()


#: Name -> its imports, how it opens, its folder.
READERS: dict[str, tuple[tuple[str, ...], Open, str]] = {
    "pread at a known offset": (("torch", "numpy"), _Plain, "plain"),
    RAW: (("torch", "holdfast"), _holdfast("raw"), "raw"),
    ZSTD: (("torch", "holdfast"), _holdfast("zstd"), "zstd"),
    DELTA: (("torch", "holdfast"), _holdfast("deltas"), "deltas"),
    "safetensors get_slice": (("torch", "safetensors"), _safetensors, "state.safetensors"),
    "torch.load(mmap=True)": (("torch",), _torch, "state.pt"),
    "icechunk": (("torch", "icechunk", "zarr"), _icechunk, "icechunk"),
    OCDBT: (("torch", "tensorstore"), _Ocdbt, "ocdbt"),
}


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _metered() -> dict[str, int]:
    """Count what Holdfast's backend hands out; return the counter, which goes on counting."""
    from holdfast.backends.local.backend import LocalBackend

    counted = {"bytes": 0, "calls": 0}
    get = LocalBackend.get

    def counting(self: Any, key: str, byte_range: Any = None, *, into: Any = None) -> bytes:
        data = get(self, key, byte_range, into=into)
        counted["bytes"] += len(data) if into is None else sum(len(view) for view in into)
        counted["calls"] += 1
        return data

    LocalBackend.get = counting  # type: ignore[method-assign,assignment]
    return counted


def read_once(reader: str, at: Path, name: str, starts: list[int], count: int) -> Figures:
    """Read two slices in this process; return its figures and the digests of their bytes."""
    modules, open_it, _ = READERS[reader]
    begun = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    backend = _metered() if reader.startswith("holdfast") else {"bytes": 0, "calls": 0}
    before, cpu, marks = _io(), time.process_time(), [time.perf_counter()]
    tensor = open_it(at, name)
    marks.append(time.perf_counter())
    first = _copied(tensor[starts[0] : starts[0] + count])
    marks.append(time.perf_counter())
    after, handed_out, cpu = _io(), dict(backend), time.process_time() - cpu
    marks.append(time.perf_counter())
    second = _copied(tensor[starts[1] : starts[1] + count])
    marks.append(time.perf_counter())
    return {
        "imports": marks[0] - begun,
        "read": marks[2] - marks[0],
        "cpu": cpu,
        "of it": marks[2] - marks[1],
        "again": marks[4] - marks[3],
        "disk_bytes": after["read_bytes"] - before["read_bytes"],
        "asked_bytes": after["rchar"] - before["rchar"],
        "backend_bytes": handed_out["bytes"],
        "backend_calls": handed_out["calls"],
        "digests": [hashlib.sha256(data).hexdigest() for data in (first, second)],
    }


def _copied(found: Any) -> bytes:
    """Return the bytes of a slice: a mapped one has not been read before."""
    if hasattr(found, "numpy"):  # a tensor, perhaps of bf16, which numpy does not have
        import torch

        found = found.contiguous().view(torch.uint8).numpy()
    data: bytes = found.tobytes()
    return data


# Writing what is read


def _write_all(at: Path, training: Any, names: list[str]) -> Any:
    """Write the state for every contender; return it."""
    import peers
    from workloads import as_bytes, flatten

    before = training.state()
    if DELTA in names:
        _save(at / "deltas", [before], keyframe_every=8)
    state = training.next_save()
    del before
    tensors = flatten(state)
    for name, act in {
        "pread at a known offset": lambda: peers.plain_write(tensors, at / "plain"),
        RAW: lambda: _save(at / "raw", [state]),
        ZSTD: lambda: _save(at / "zstd", [state], compression="zstd"),
        DELTA: lambda: _save(at / "deltas", [state]),
        "safetensors get_slice": lambda: peers.safetensors_save(tensors, at / "state.safetensors"),
        "torch.load(mmap=True)": lambda: peers.torch_save(state, at / "state.pt"),
        "icechunk": lambda: _write_icechunk(at, tensors),
        OCDBT: lambda: _write_ocdbt(at, tensors),
    }.items():
        if name in names:
            act()
    table, offset = {}, 0
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.").replace("bfloat16", "uint16")
        table[path.removeprefix("model.")] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "offset": offset,
        }
        offset += len(as_bytes(tensor))
    (at / "plain.json").write_text(json.dumps(table))
    return state


def _save(folder: Path, states: list[Any], **options: Any) -> None:
    import holdfast

    is_new = not folder.exists()
    opened = holdfast.init(folder, **options) if is_new else holdfast.open(folder)
    with opened:
        run = opened.create_run("run", seed=0) if is_new else opened.run("run")
        for state in states:
            run.save(state, step=state["global_step"])


def _rows(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    """Return a chunk of whole rows of at most the size of Holdfast's."""
    row_bytes = item_bytes
    for length in shape[1:]:
        row_bytes *= length
    return [max(1, min(shape[0], CHUNK_BYTES // max(1, row_bytes))), *shape[1:]] if shape else []


def _array(tensor: Any) -> Any:
    import torch

    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy()


def _write_icechunk(at: Path, tensors: Any) -> None:
    import icechunk
    import zarr

    storage = icechunk.local_filesystem_storage(str(at / "icechunk"))
    session = icechunk.Repository.create(storage).writable_session("main")
    root = zarr.open_group(session.store, mode="w")
    for path, tensor in tensors.items():
        array = _array(tensor)
        chunks = tuple(_rows(array.shape, array.itemsize)) or None
        root.create_array(
            path.replace(".", "/", 1), data=array, chunks=chunks or "auto", compressors=None
        )
    session.commit("state")


def _write_ocdbt(at: Path, tensors: Any) -> None:
    import tensorstore

    pending = []
    for path, tensor in tensors.items():
        array = _array(tensor)
        spec = _ocdbt_spec(at, path.removeprefix("model."))
        spec["metadata"] = {
            "shape": list(array.shape),
            "chunks": _rows(array.shape, array.itemsize),
            "dtype": array.dtype.str,
            "compressor": None,
        }
        opened = tensorstore.open(spec, create=True).result()
        pending.append(opened.write(array))
        if len(pending) > 32:
            pending.pop(0).result()
    for write in pending:
        write.result()


# Rounds


def measure(options: argparse.Namespace, at: Path) -> tuple[dict[str, list[Figures]], int]:
    """Write everything, then run the rounds; return the figures and the size of a slice."""
    from peers import forget, recall
    from presence import is_here
    from workloads import WORKLOADS, as_bytes

    names = [
        name
        for name, (modules, *_) in READERS.items()
        if name not in options.without and is_here(name, *modules)
    ]
    state = _write_all(at, WORKLOADS[options.workload](options.scale), names)
    (name,) = TENSOR[options.workload]
    tensor = state["model"][name]
    del state
    count = max(1, len(tensor) // 100)
    order = random.Random(0)
    figures: dict[str, list[Figures]] = {reader: [] for reader in names}
    for number in range(options.rounds + 1):
        starts = [order.randrange(len(tensor) - count) for _ in range(2)]
        wanted = [
            hashlib.sha256(as_bytes(tensor[start : start + count].contiguous())).hexdigest()
            for start in starts
        ]
        for reader in order.sample(names, len(names)):
            (recall if options.warm else forget)(at / READERS[reader][2])
            words = ["--reader", reader, "--name", name, "--rows", str(count), *map(str, starts)]
            begun = time.perf_counter()
            command = [sys.executable, __file__, "--at", str(at), *words]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=_env()
            )
            took = time.perf_counter() - begun
            found = {"process": took, **json.loads(done.stdout.splitlines()[-1])}
            if found["digests"] != wanted:
                raise SystemExit(f"{reader} read something else")
            if number:  # the first round warms up what is imported
                figures[reader].append(found)
    return figures, tensor[:count].nbytes


def _env() -> dict[str, str]:
    """Return an environment in which compiled modules are kept, as installed ones are."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def _print(figures: dict[str, list[Figures]], slice_bytes: int, options: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=180)
    cache = "warm" if options.warm else "cold"
    size = f"{slice_bytes / 1e6:.2f} MB"
    title = f"{options.workload}: a slice of {size}, {cache}, medians of {options.rounds}"
    table = Table(title=title)
    table.add_column("contender", no_wrap=True)
    columns = ("read ms", "least", "/ OCDBT", "/ best peer", "CPU ms", "of it ms", "again ms")
    for column in (
        *columns,
        "disk MB",
        "most",
        "asked MB",
        "backend MB",
        "calls",
        "imports",
        "process ms",
    ):
        table.add_column(column, justify="right")

    def middle(name: str, what: str) -> float:
        return median(each[what] for each in figures[name])

    def ratio(name: str, of: str) -> str:
        pairs = zip(figures[name], figures[of], strict=True)
        return f"{median(a['read'] / b['read'] for a, b in pairs):.2f}"

    peers = [name for name in figures if not name.startswith(("holdfast", "pread"))]
    best = min(peers, key=lambda name: middle(name, "read"))
    for name, rounds in sorted(figures.items(), key=lambda item: middle(item[0], "read")):
        table.add_row(
            name,
            f"{middle(name, 'read') * 1e3:.1f}",
            f"{min(each['read'] for each in rounds) * 1e3:.1f}",
            ratio(name, OCDBT) if OCDBT in figures else "",
            ratio(name, best),
            f"{middle(name, 'cpu') * 1e3:.1f}",
            f"{middle(name, 'of it') * 1e3:.1f}",
            f"{middle(name, 'again') * 1e3:.1f}",
            f"{middle(name, 'disk_bytes') / 1e6:.2f}",
            f"{max(each['disk_bytes'] for each in rounds) / 1e6:.2f}",
            f"{middle(name, 'asked_bytes') / 1e6:.2f}",
            f"{middle(name, 'backend_bytes') / 1e6:.2f}",
            f"{middle(name, 'backend_calls'):.0f}",
            f"{middle(name, 'imports') * 1e3:.0f}",
            f"{middle(name, 'process') * 1e3:.0f}",
        )
    console.print(table)
    limit = (2 * slice_bytes + CHUNK_BYTES) / 1e6
    console.print(f"best peer: {best}; goals: disk <= {limit:.2f} MB, / OCDBT <= {GOAL:.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=TENSOR, default="lm")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--dir", type=Path, help="on a real disk; default: the temp folder")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--without", nargs="*", choices=READERS, default=[], metavar="CONTENDER")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.reader:
        count, *starts = options.rows
        print(json.dumps(read_once(options.reader, options.at, options.name, starts, count)))
        return
    at = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        figures, slice_bytes = measure(options, at)
    finally:
        shutil.rmtree(at)
    _print(figures, slice_bytes, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
