"""Fuzz targets: one for each format of files, for a few inputs in a test or for long by hand.

    python -m tests.support.fuzzing FORMAT SECONDS

An input is a sound file with bytes changed; reading it must give a state or a typed error, within
a bound of memory and time. With atheris, which follows the branches that an input reaches, the
program uses that; without it, its own mutations. It prints what it did, and the input that failed.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch

from holdfast.registry import formats
from holdfast.registry.errors import RegistryError
from holdfast.registry.formats import table
from holdfast.registry.formats.thalia import save_delta
from holdfast.registry.formats.thalia.framing import DELTA_MAGIC
from tests.registry.formats import test_burn, test_cobre, test_hf, test_thalia

try:
    import atheris
except ImportError:
    atheris: ModuleType | None = None  # type: ignore[no-redef]

#: The formats that read more than bytes.
FORMATS = ("torch", "safetensors", "zarr", "npz", "thalia", "burn", "hf", "cobre", "andrea")
#: The most memory of the process beyond what it has at its start, and time for one input.
MEMORY_BYTES = 6 * 2**30
INPUT_S = 20
#: Seconds of one process with atheris, which keeps the result of each comparison of arrays.
PART_S = 300


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


def repacked(archive: Path, pickle: bytes) -> bytes:
    """Return an archive of torch with another pickle, so that a changed one is always reached."""
    made = io.BytesIO()
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("/data.pkl")
            new.writestr(entry, pickle if is_pickle else old.read(entry))
    return made.getvalue()


def pickle_of(archive: Path) -> bytes:
    """Return the pickle of an archive of torch."""
    with zipfile.ZipFile(archive) as found:
        (name,) = (name for name in found.namelist() if name.endswith("/data.pkl"))
        return found.read(name)


class Target:
    """The reader of one format, and sound files to change.

    Args:
        name: The format.
        folder: An empty folder for its files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tried = self.refused = 0
        self.roots = samples(name, folder)
        self.files = [
            (root, file, file.read_bytes())
            for root in self.roots
            for file in (sorted(root.rglob("*")) if root.is_dir() else [root])
            if file.is_file()
        ]
        #: A file of which only the pickle is changed.
        self.pickled = folder / "pickled.pt"
        if name == "torch":
            others = [one for one in self.files if one[1] != self.pickled]
            self.files = [*others, (self.pickled, self.pickled, pickle_of(self.pickled))]

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
        root, file, sound = self.files[data[0] % len(self.files)]
        content = data[1:]
        if file == self.pickled:
            content, sound = repacked(file, content), file.read_bytes()
        if self.name == "thalia" and not content.startswith(DELTA_MAGIC):  # deltas have no checksum
            content = content[:-32] + hashlib.sha256(content[:-32]).digest()
        file.write_bytes(content)
        self.tried += 1
        try:
            with _limited():
                formats.read(root, format=self.name, portable=self.tried % 2 == 0)
                formats.inspect(root, format=self.name)
        except RegistryError:
            self.refused += 1
            with _limited():
                formats.validate(root, format=self.name)
        finally:
            file.write_bytes(sound)


@contextmanager
def _limited() -> Iterator[None]:
    """Stop a reading that does not end."""
    signal.setitimer(signal.ITIMER_REAL, INPUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError(f"one input took more than {INPUT_S} s")


def _bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))


def _report(target: Target, seconds: float, engine: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{target.name}: {target.tried} inputs in {seconds:.0f} s ({engine}), "
        f"{target.refused} refused, peak {peak} MiB, no fault",
        flush=True,
    )


def _own(target: Target, seconds: float) -> None:
    chance, start = random.Random(), time.monotonic()
    while time.monotonic() - start < seconds:
        data = target.mutated(chance)
        try:
            target.try_one(data)
        except BaseException:
            Path(f"fuzz-{target.name}.bin").write_bytes(data)
            print(f"the input is in fuzz-{target.name}.bin", file=sys.stderr)
            raise
    _report(target, time.monotonic() - start, "own mutations")


def _with_atheris(target: Target, folder: Path, seconds: float, corpus: Path) -> None:
    assert atheris is not None
    corpus.mkdir(exist_ok=True)
    for number, (_, _, data) in enumerate(target.files):
        (corpus / str(number)).write_bytes(bytes([number]) + data)
    start = time.monotonic()

    def one(data: bytes) -> None:
        target.try_one(data)
        if time.monotonic() - start > seconds:
            _report(target, time.monotonic() - start, "atheris")
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)  # the library has no other way out of its loop

    options = ["-rss_limit_mb=8192", "-max_len=20000", "-verbosity=0", str(corpus)]
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def _instrument() -> None:
    """Let atheris follow every function, method and closure that reads bytes of files."""
    assert atheris is not None
    for one in table.FORMATS:
        assert one.module
    rooms = tuple(f"holdfast.registry.{room}" for room in ("formats", "pytree", "zarr", "values"))
    for value in gc.get_objects():
        # The type itself: asking a lazy object of torch for its class would load it.
        if type(value) is FunctionType and (value.__module__ or "").startswith(rooms):
            atheris.instrument_func(value)


def _in_parts(name: str, seconds: float) -> None:
    """Run one target in several processes, one after another, that share what they have found."""
    with tempfile.TemporaryDirectory() as corpus:
        while seconds > 0:
            part = str(min(seconds, PART_S))
            command = [sys.executable, "-m", "tests.support.fuzzing", name, part, corpus]
            if status := subprocess.run(command, check=False).returncode:
                sys.exit(status)
            seconds -= PART_S


def main(name: str, seconds: str, corpus: str | None = None) -> None:
    """Run one target for some time.

    Args:
        name: The format.
        seconds: How long.
        corpus: A folder for inputs that reach something new; with atheris alone.
    """
    if atheris is not None and name in FORMATS and float(seconds) > PART_S:
        return _in_parts(name, float(seconds))
    warnings.simplefilter("ignore")
    if name not in FORMATS:
        sys.exit(f"no such format: {name}; one of {', '.join(FORMATS)}")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    (folder / "files").mkdir()
    signal.signal(signal.SIGALRM, _out_of_time)
    try:
        target = Target(name, folder / "files")
        for root in target.roots:
            formats.read(root, format=name, portable=True)
        _bound_memory()
        if atheris is None:
            _own(target, float(seconds))
        else:
            found = folder / "corpus" if corpus is None else Path(corpus)
            _with_atheris(target, folder, float(seconds), found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if atheris is not None and float(sys.argv[2]) <= PART_S:
        _instrument()
    main(*sys.argv[1:])
