"""LoRA adapters by name: vLLM asks for a name that it does not know, and gets a folder.

The name comes from whoever sends a request for a completion. It is read as a ref and is never part
of a path: folders are named after the revision of their files. A run that is not allowed is
answered like one that is absent. Refs that are read each minute, and bytes on the disk, are
bounded. vLLM reads a folder again whenever it has dropped an adapter from its memory, and ends if
the folder is gone; so a folder stays while a process that was told of it lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from holdfast.backends.escape import printable, quoted
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError, StoreFull
from holdfast.registry.face import Registry, find_in_run
from holdfast.registry.face import open as open_registry
from holdfast.registry.formats import json_value
from holdfast.registry.hub.engines.folder import Here, places
from holdfast.registry.hub.views import View, ViewOptions, view_of
from holdfast.registry.loading import Joined
from holdfast.registry.objects import is_run_id

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_VARIABLE = "HOLDFAST_LORA_"
_NAMES = ("RUNS", "FOLDER", "BASES", "BYTES", "PER_MINUTE")
_LONGEST_NAME, _CONFIG_BYTES, _MOST_FOLDERS = 512, 2**20, 256
_FOLDER = re.compile(r"[0-9a-f]{40}-[0-9a-f]{8}")
_LOGGER = logging.getLogger("holdfast")


def register_lora() -> None:
    """Register the resolver with vLLM, which calls this in each of its processes.

    Without `HOLDFAST_LORA_RUNS` nothing happens. docs/engines.md lists the variables.

    Raises:
        InvalidInput: A variable of the environment is wrong; vLLM does not start.
    """
    given = {name: os.environ.get(f"{_VARIABLE}{name}", "") for name in _NAMES}
    if not given["RUNS"]:
        return
    bounds = [given["BYTES"] or "10000000000", given["PER_MINUTE"] or "60"]
    if not given["FOLDER"] or not all(one.isdecimal() and int(one) for one in bounds):
        expected = "a folder, and whole numbers from 1 as BYTES and PER_MINUTE"
        raise InvalidInput("not settings for adapters", where=f"{_VARIABLE}*", expected=expected)
    runs, bases = (tuple(filter(None, given[name].split(","))) for name in ("RUNS", "BASES"))
    folders = LoraFolders(Path(given["FOLDER"]), runs, bases, *map(int, bounds))
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    class HoldfastResolver(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            folder = await folders.find(base_model_name, lora_name)
            # vLLM replaces the number with one of its own.
            return folder and LoRARequest(lora_name, 1 + int(folder.name[:7], 16), str(folder))

    LoRAResolverRegistry.register_resolver("Holdfast", HoldfastResolver())


class LoraFolders:
    """The adapters on this host, as folders that several processes may share."""

    def __init__(
        self,
        root: Path,  # on a local disk, for these folders alone
        runs: Sequence[str],  # patterns of the names of runs that may be asked for
        bases: Sequence[str],  # other names that adapters have for the model that is served
        most_bytes: int,  # of all folders
        per_minute: int,  # refs that are read, at most
    ) -> None:
        self._root, self._runs, self._bases = root.absolute(), runs, bases
        self._most_bytes, self._per_minute = most_bytes, per_minute
        # One thread: it opens the registry late, after vLLM has forked, and writes one at a time.
        self._thread = ThreadPoolExecutor(1, "holdfast-lora")
        self._registry: Registry | None = None
        self._held: dict[Path, int] = {}  # the folders that vLLM was told of, locked
        self._reading = 0  # refs
        self._read_s: deque[float] = deque()  # when refs were read, in the last minute

    async def find(self, base: str, name: str) -> Path | None:
        """Return the folder of an adapter of a base; `None`, and a warning, if there is none."""
        run_id, _, path = name[: _LONGEST_NAME + 1].partition("/")
        is_allowed = any(fnmatchcase(run_id, one) for one in self._runs)
        if len(name) > _LONGEST_NAME or not is_run_id(run_id) or not is_allowed:
            return None
        now_s = time.monotonic()
        while self._read_s and now_s - self._read_s[0] >= 60:
            self._read_s.popleft()
        if self._reading + len(self._read_s) >= self._per_minute:
            _LOGGER.warning("no LoRA: more new names than %sPER_MINUTE", _VARIABLE)
            return None
        self._reading += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._make, base, run_id, path)
        except (RegistryError, OSError) as error:
            _LOGGER.warning("no LoRA %s: %s", printable(name), error)
            return None
        finally:
            self._reading -= 1
            self._read_s.append(time.monotonic())

    def _make(self, base: str, run_id: str, path: str) -> Path:
        if self._registry is None:
            self._registry = open_registry(read_only=True)
        run = self._registry.run(run_id)
        stored = find_in_run(run.handle.store, run.handle.log, path)
        view = view_of(stored, ViewOptions(2**62, ("config",)))
        files = _adapter_of(view, (base, *self._bases))
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / ".lock").open("a") as lock:  # the processes take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = (one for one in self._folders() if one.name.startswith(view.revision))
            folder = next((one for one in kept if _is_whole(one, files)), None)
            if folder is None:
                self._make_room(sum(file.size for file in files.values()))
                new = self._root / ".new"
                shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
                Here().write(files, new)
                folder = new.rename(self._root / f"{view.revision}-{secrets.token_hex(4)}")
            os.utime(folder)
            if folder not in self._held:
                self._held[folder] = os.open(folder, os.O_RDONLY)
                fcntl.flock(self._held[folder], fcntl.LOCK_SH)
        return folder

    def _folders(self) -> list[Path]:
        """Return the folders of adapters, the one that was asked for longest ago first."""
        found = [one for one in self._root.iterdir() if _FOLDER.fullmatch(one.name)]
        return sorted(found, key=lambda one: one.stat().st_mtime)

    def _make_room(self, size: int) -> None:
        """Remove the folders that were asked for longest ago, and that no process was told of."""
        most = self._most_bytes
        sizes = {one: sum(f.stat().st_size for f in one.iterdir()) for one in self._folders()}

        def fits() -> bool:
            return len(sizes) < _MOST_FOLDERS and sum(sizes.values()) + size <= most

        for oldest in [*sizes]:
            if fits() or size > most:  # nothing makes room for a larger one
                break
            if _removed(oldest):
                del sizes[oldest]
        if fits():
            return
        raise StoreFull(
            "no room for one more adapter",
            where=self._root,
            expected=f"at most {_MOST_FOLDERS} folders and {most} bytes",
            found=f"{len(sizes)} folders, {sum(sizes.values())} bytes, and {size} of the adapter",
            hint=f"Raise {_VARIABLE}BYTES, or start engines again: each keeps what it was told of.",
        )


def _adapter_of(view: View, bases: tuple[str, ...]) -> dict[str, Joined]:
    """Return the two files of an adapter, if it is a LoRA of one of these bases."""
    files = {name: view.files[name] for name in (_CONFIG, _WEIGHTS) if name in view.files}
    where, found = view.stored.ref, ", ".join(view.files)
    if len(files) == 2 and files[_CONFIG].size <= _CONFIG_BYTES:
        config = json_value(files[_CONFIG].read(0, files[_CONFIG].size), f"{where}: {_CONFIG}")
        said = config if isinstance(config, dict) else {}
        kind, base = said.get("peft_type"), said.get("base_model_name_or_path")
        if kind == "LORA" and base in bases:
            return files
        found = f"{quoted(kind)[:40]} of {quoted(base)[:200]}"
    raise IncompatibleState(
        "not a LoRA adapter of the model that is served",
        where=where,
        expected=f"{_CONFIG} and {_WEIGHTS}, LORA of {' or '.join(bases)}",
        found=found,
        hint=f"Other names of the same model belong in {_VARIABLE}BASES.",
    )


def _removed(folder: Path) -> bool:
    """Remove a folder unless a process was told of it: its engine may read it again."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _is_whole(folder: Path, files: Mapping[str, Joined]) -> bool:
    """Compare the files in a folder with these, byte by byte; only what differs is fetched."""
    here = Here(places(files, folder))
    for name, wanted in files.items():
        with suppress(OSError), (folder / name).open("rb") as file:
            parts = here.stream(wanted)[1]
            if all(file.read(len(part)) == part for part in parts) and not file.read(1):
                continue
        return False
    return True
