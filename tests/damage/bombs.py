"""Registries that are small, whole by every digest, and made to fill the memory of a reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import holdfast
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import AddCheckpoint, Place
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.framing import wrap_frame
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.placement import Placement, Rows
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest

#: Reads a registry in another process; prints the result, and by how many MiB the process
#: grew meanwhile at most.
_PROGRAM = r"""
import re, sys
from pathlib import Path
import holdfast

def peak():  # what getrusage tells begins with the memory of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

with holdfast.open(sys.argv[1]) as opened:
    opened.run_names()
    before = peak()
    try:
        said = ACT
    except holdfast.RegistryError as error:
        said = type(error).__name__ + " " + str(error)
    print(peak() - before, said)
"""
#: What is done with the registry.
ACTS = {
    "load": "opened.checkpoint('bomb/latest').load()",
    "restore": "opened.run('bomb').restore()",
    "tensors": "opened.checkpoint('bomb/latest').tensors()",
    "verify": "[finding.message for finding in opened.verify().findings]",
}


def read_apart(folder: Path, act: str) -> tuple[int, str]:
    """Return by how many MiB a process grew that did something, and what came of it."""
    program = _PROGRAM.replace("ACT", ACTS[act])
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    grown, _, said = done.stdout.partition(" ")
    return int(grown), said


def sealed(skeleton: bytes, tensors: bytes = b"[]") -> tuple[Digest, bytes]:
    """Return the id and the file of a manifest with one component of this canonical JSON."""
    part = b'{"grid":"rows/1","skeleton":%b,"tensors":%b}' % (skeleton, tensors)
    named = {"components": [["m", Digest.of(part).hex()]]}
    said = {"format": "holdfast.checkpoint/1", "kind": "dict"}
    content = b'{"components":[["m",%b]],"format":"holdfast.checkpoint/1","kind":"dict"}' % part
    return Digest.of(canonical.encode(named | said)), wrap_frame(content)


def plant(
    folder: Path,
    manifest: tuple[Digest, bytes],
    placement: Callable[[Placement], tuple[Digest, bytes]] | None = None,
) -> None:
    """Make a registry whose run `bomb` has a sound checkpoint and then one of this manifest.

    Args:
        folder: Where to.
        manifest: Its id and its file.
        placement: Gives name and file of its placement, for that of the sound one; one without
            rows without it.
    """
    with holdfast.init(folder, skip_race_probe=True) as opened:
        sound = opened.create_run("bomb").save({"m": {"w": np.arange(100)}}, step=1)
        digest, data = manifest
        empty = Placement(digest, (), Rows(()))
        name, placed = empty.digest, empty.encode()
        if placement is not None:
            name, placed = placement(sound.handle.reader.placement)
        _append(opened, digest, data, name, placed)


def _append(opened: Registry, digest: Digest, data: bytes, name: Digest, placed: bytes) -> None:
    place = Place(manifest=digest, manifest_generation=0, placement=name, placement_generation=0)
    store = opened.handle.store
    store.backend.put(str(ObjectKey("manifests", digest, 0)), data)
    store.backend.put(str(ObjectKey("placements", name, 0)), placed)
    log = RunLog(store, "bomb")
    added = AddCheckpoint(manifest=digest, phase="main", step=2, size_bytes=0)
    log.open()
    log.append(lambda state: [place, commit_line(state, [added])])
