"""Fuzz targets: one for each format of files, for a few inputs in a test or for long by hand.

    python -m tests.support.fuzzing FORMAT SECONDS [CORPUS]

An input is a sound file with bytes changed, or a file that attacks readers; reading it must give a
state or a typed error, within memory and time in proportion to its bytes. With atheris, which
follows the branches that an input reaches, the program uses that; without it, its own mutations. It
writes its figures as a line of JSON, and the input that failed to a file. `scripts/fuzz` starts it,
in several processes one after another.
"""

from __future__ import annotations

import dis
import gc
import hashlib
import io
import json
import operator as op
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

from holdfast.backends.limits import VARIABLE
from holdfast.registry import formats
from holdfast.registry.errors import RegistryError
from holdfast.registry.formats import table
from holdfast.registry.formats.thalia import save_delta
from holdfast.registry.formats.thalia.framing import DELTA_MAGIC
from tests.registry.formats import test_burn, test_cobre, test_hf, test_thalia
from tests.support import attacks
from tests.support.foreign import FOLDER

#: The formats that read more than bytes.
FORMATS = ("torch", "safetensors", "zarr", "npz", "thalia", "burn", "hf", "cobre", "andrea")
#: The most memory of the process beyond what it has at its start.
MEMORY_BYTES = 6 * 2**30
#: What one record may take meanwhile, and what one input may: so much, and more for each byte.
RECORD_BYTES = 64 * 2**20
GROWTH_BYTES, GROWTH_PER_BYTE = 4 * RECORD_BYTES, 2000
INPUT_S, S_PER_BYTE = 5.0, 5e-4
#: The number by which `attacks` makes its files as seeds.
ATTACK = 300
#: The most bytes of an input.
INPUT_BYTES = 20_000


def samples(name: str, folder: Path) -> list[Path]:
    """Write sound files or folders of a format."""
    tensors = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.int16)}
    match name:
        case "torch":
            state = {
                "m": tensors,
                "t": torch.ones(4, 4).T,
                "s": torch.eye(2).to_sparse(),
                "n": [np.arange(3), np.float32(1), b"x", {1}, torch.Size([2])],
            }
            torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
            torch.save(state, folder / "pickled.pt")
            torch.serialization.set_crc32_options(False)  # so that a changed pickle is read
            try:
                torch.save(state, folder / "a.pt")
            finally:
                torch.serialization.set_crc32_options(True)
        case "safetensors":
            formats.write(folder / "a.safetensors", {"model": tensors})
            test_hf.sharded(folder / "shards")
            return [folder / "a.safetensors", folder / "shards" / "model.safetensors.index.json"]
        case "zarr":
            formats.write(folder / "a.zarr", {"arrays": tensors})
        case "npz":
            formats.write(folder / "a.npz", {"arrays": tensors})
            formats.write(folder / "entry.npz", {"arrays": {"a": np.arange(3)}})
            np.savez_compressed(folder / "b.npz", a=np.arange(12).reshape(3, 4).T, b=np.ones(2))
        case "thalia":
            for ending in ("", ".zst", ".lz4"):
                formats.write(folder / f"a.thalia{ending}", test_thalia.brain())
            (folder / "document.thalia").write_bytes(test_thalia.documented()[0])
            grown = test_thalia.brain()
            weights = grown["regions"]["cortex"]["weights"]
            weights["w_ff"] += 1
            weights["w_rec"][3, 4] += 1
            grown["regions"]["new"] = {"weights": {"w": np.ones(3)}}
            save_delta(folder / "b.delta.thalia", grown, folder / "a.thalia")
        case "burn":
            (folder / "a.mpk").write_bytes(test_burn.record(test_burn.ITEM))
        case "hf":
            test_hf.small(folder / "a")
            torch.save({"state": {0: tensors["w"]}}, folder / "a" / "optimizer.pt")
        case "cobre":
            formats.write(folder / "a", test_cobre.policy(), format="cobre")
            test_cobre.old_policy(folder / "old", "0.4.4", domination=True)
        case "andrea":
            part = torch.arange(6.0)
            state = {"step": 3, "weights": part, "m": part, "v": part}
            formats.write(folder / "step_000003.bin", state, format="andrea")
    return sorted(folder.iterdir())


def attacking(name: str, folder: Path) -> list[Path]:
    """Write the small files that attack the readers of a format."""
    folder.mkdir()
    ends = {"torch": ".pt", "safetensors": ".safetensors", "npz": ".npz", "burn": ".mpk"}
    return [
        attacks.planted(one, ATTACK, folder)
        for one in attacks.FILES
        if one.endswith(ends.get(name, "/")) or (name == "thalia" and ".thalia" in one)
    ]


def foreign_samples(name: str, folder: Path) -> list[Path]:
    """Copy the files and folders of a format that programs of other systems wrote, if any."""
    if not FOLDER.is_dir():
        return []
    shutil.copytree(FOLDER, folder / "foreign", ignore=shutil.ignore_patterns("*.md", "*.json"))
    return [
        path
        for path in sorted((folder / "foreign").rglob("*"))
        if path.stat().st_size < INPUT_BYTES
        and formats.detect(path) == name
        and not formats.validate(path, format=name)
    ]


def entry_of(archive: Path) -> str | None:
    """Return the entry of an archive of which only that one is changed."""
    if archive.parent.name == "attacks" and archive.suffix == ".pt":
        return "a/data.pkl"
    return {"pickled.pt": "pickled/data.pkl", "entry.npz": "a.npy"}.get(archive.name)


def repacked(archive: bytes, name: str, content: bytes) -> bytes:
    """Return an archive with another content of an entry, whose checksum is right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, content if entry.filename == name else old.read(entry))
    return made.getvalue()


class Target:
    """The reader of one format, and sound files to change.

    Args:
        name: The format.
        folder: An empty folder for its files.
        foreign: Whether files of other programs are among them, where they are at hand.
    """

    def __init__(self, name: str, folder: Path, *, foreign: bool = False) -> None:
        self.name = name
        self.tried = self.refused = 0
        self.roots = samples(name, folder)
        if foreign:
            self.roots += foreign_samples(name, folder)
        self.files = [
            (root, file, self._changeable(file))
            for root in self.roots
            for file in (sorted(root.rglob("*")) if root.is_dir() else [root])
            if file.is_file()
        ]
        seeds = attacking(name, folder / "attacks")
        self.files += [(file, file, self._changeable(file)) for file in seeds]

    @staticmethod
    def _changeable(file: Path) -> bytes:
        """Return the bytes of a file that are changed: all, or those of one entry."""
        entry = entry_of(file)
        if entry is None:
            return file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            return archive.read(entry)

    def mutated(self, chance: random.Random) -> bytes:
        """Return an input: the number of a file, and its changed content."""
        number = chance.randrange(len(self.files))
        data = bytearray(self.files[number][2])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0 | 1 if at < len(data):
                    data[at] = chance.randrange(256)
                case 2 if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
                case 3:
                    other = chance.choice(self.files)[2]
                    start = chance.randrange(len(other) + 1)
                    data[at : at + chance.randrange(9)] = other[start : start + 8]
                case _:
                    extreme = chance.choice([0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
                    data[at : at + 8] = extreme.to_bytes(8, chance.choice(["little", "big"]))
            if not data:
                data = bytearray(1)
        return bytes([number]) + bytes(data)

    def try_one(self, data: bytes) -> None:
        """Read an input; raise whatever is no typed error."""
        if not data:
            return
        root, file, _ = self.files[data[0] % len(self.files)]
        content, sound = data[1:], file.read_bytes()
        if entry := entry_of(file):
            content = repacked(sound, entry, content)
        if self.name == "thalia" and not content.startswith(DELTA_MAGIC):  # deltas have no checksum
            content = content[:-32] + hashlib.sha256(content[:-32]).digest()
        file.write_bytes(content)
        self.tried += 1
        try:
            with _limited(len(data)):
                formats.read(root, format=self.name, portable=self.tried % 2 == 0)
                formats.inspect(root, format=self.name)
        except RegistryError:
            self.refused += 1
            with _limited(len(data)):
                formats.validate(root, format=self.name)
        finally:
            file.write_bytes(sound)


@contextmanager
def _limited(nbytes: int) -> Iterator[None]:
    """Stop a reading that takes too long, and refuse one that took too much memory.

    Only its own time counts: other programs may run too.
    """
    before = _peak_bytes()
    signal.setitimer(signal.ITIMER_PROF, INPUT_S + S_PER_BYTE * nbytes)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak_bytes() - before
    if grown > GROWTH_BYTES + GROWTH_PER_BYTE * nbytes:
        raise MemoryError(f"an input of {nbytes} bytes took {grown} bytes of memory")


def _peak_bytes() -> int:
    """Return the most memory that the process has had; it only ever grows."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError("one input took far more time than its bytes deserve")


def _bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))


def _report(target: Target, seconds: float) -> None:
    figures = {
        "inputs": target.tried,
        "refused": target.refused,
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(figures), flush=True)


def _own(target: Target, seconds: float) -> None:
    chance, start = random.Random(), time.process_time()
    while time.process_time() - start < seconds:
        data = target.mutated(chance)
        try:
            target.try_one(data)
        except BaseException:
            Path(f"fuzz-{target.name}.bin").write_bytes(data)
            print(f"the input is in fuzz-{target.name}.bin", file=sys.stderr)
            raise
    _report(target, time.process_time() - start)


def _library() -> ModuleType | None:
    """Return atheris where it is installed. Importing it is for programs, not for tests."""
    return None if find_spec("atheris") is None else import_module("atheris")


def _with_atheris(
    atheris: ModuleType, target: Target, folder: Path, seconds: float, corpus: Path
) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for number, (_, _, data) in enumerate(target.files):
        (corpus / str(number)).write_bytes(bytes([number]) + data)
    start = time.process_time()
    shift = import_module("atheris.version_dependent").CMP_OP_SHIFT_AMOUNT

    def one(data: bytes) -> None:
        if atheris._trace_cmp.__name__ != "compared":  # the library sets its own at its start
            atheris._trace_cmp = _comparison(atheris._trace_cmp, shift)  # type: ignore[attr-defined]
        target.try_one(data)
        if time.process_time() - start > seconds:
            _report(target, time.process_time() - start)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)  # the library has no other way out of its loop

    def changed(data: bytes, most: int, seed: int) -> bytes:
        mutated: bytes = atheris.Mutate(data[1:], most - 1)
        return data[:1] + mutated  # of the same file

    options = [
        "-rss_limit_mb=8192",
        f"-max_len={INPUT_BYTES}",
        f"-artifact_prefix=fuzz-{target.name}-",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=changed)
    atheris.Fuzz()


def _instrument(atheris: ModuleType) -> None:
    """Let atheris follow every function, method and closure that reads bytes of files."""
    for one in table.FORMATS:
        assert one.module
    rooms = tuple(f"holdfast.registry.{room}" for room in ("formats", "pytree", "zarr", "values"))
    for value in gc.get_objects():
        # The type itself: asking a lazy object of torch for its class would load it.
        if type(value) is FunctionType and (value.__module__ or "").startswith(rooms):
            atheris.instrument_func(value)


def _comparison(traced: Callable[..., object], shift: int) -> Callable[..., object]:
    """Return the comparison of atheris for plain values alone: it never frees a result.

    That of two arrays is an array, and memory would only grow.
    """
    plain = (int, str, bytes, float, NoneType)
    signs = dict(zip(dis.cmp_op, (op.lt, op.le, op.eq, op.ne, op.gt, op.ge), strict=True))

    def compared(left: Any, right: Any, sign: int, counter: int, constant: bool) -> object:
        if isinstance(left, plain) and isinstance(right, plain):
            return traced(left, right, sign, counter, constant)
        return signs[dis.cmp_op[sign >> shift]](left, right)

    return compared


def main(name: str, seconds: str, corpus: str | None = None) -> None:
    """Run one target for some time.

    Args:
        name: The format.
        seconds: How long, in seconds of the processor.
        corpus: A folder for inputs that reach something new; with atheris alone.
    """
    warnings.simplefilter("ignore")
    os.environ[VARIABLE] = str(RECORD_BYTES)
    atheris = _library()
    if atheris is not None:
        _instrument(atheris)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    (folder / "files").mkdir()
    signal.signal(signal.SIGPROF, _out_of_time)
    try:
        target = Target(name, folder / "files", foreign=True)
        for root in target.roots:
            formats.read(root, format=name, portable=True)
        _bound_memory()
        if atheris is None:
            _own(target, float(seconds))
        else:
            found = folder / "corpus" if corpus is None else Path(corpus)
            _with_atheris(atheris, target, folder, float(seconds), found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
