"""Peak extra memory of one load, measured in a process of its own.

The process allocates and touches the state to load into, resets the kernel's high-water mark of
its resident memory, loads, and reads the mark. Pages of a file that a peer maps count too, although
the kernel could take them back. Prints a JSON object; `save_load.py` runs one process a contender.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peers
from workloads import WORKLOADS, State, empty_like, flatten

Loader = Callable[[Path, str, State], None]


def measure(loader: str, workload: str, scale: float, at_rest: Path, ref: str) -> dict[str, int]:
    """Run this module in a new process; return extra bytes of a first and of a second load."""
    options = {"--loader": loader, "--workload": workload, "--scale": str(scale), "--ref": ref}
    words = [word for option in options.items() for word in option]
    command = [sys.executable, __file__, *words, "--at", str(at_rest)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, int] = json.loads(printed)
    return figures


LOADERS: dict[str, Loader] = {
    "plain read": lambda at_rest, _, into: peers.plain_read(at_rest / "plain", flatten(into)),
    "read and hash": lambda at_rest, _, into: peers.hashed_read(at_rest / "plain", flatten(into)),
    "safetensors load": lambda at_rest, _, into: peers.safetensors_load(
        at_rest / "state.safetensors", flatten(into)
    ),
    "torch.load": lambda at_rest, _, into: peers.torch_load(at_rest / "state.pt", flatten(into)),
}


HOLDFAST = "holdfast load"


def _loader(name: str) -> Loader:
    if name != HOLDFAST:
        return LOADERS[name]
    # Imported for this loader alone: the others must not pay for it.
    from holdfast_contender import load

    return lambda at_rest, ref, into: load(at_rest / "registry", ref, into)


def _extra_bytes(load: Callable[[], None]) -> int:
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is still resident would hide what is used
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    load()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak extra memory of a load.")
    parser.add_argument("--loader", choices=[HOLDFAST, *LOADERS], required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--at", type=Path, required=True, help="folder of what is loaded")
    parser.add_argument("--ref", default="", help="name of the checkpoint in the registry")
    options = parser.parse_args()
    target = empty_like(WORKLOADS[options.workload](options.scale).state())
    loader = _loader(options.loader)

    def load() -> None:
        loader(options.at, options.ref, target)

    print(json.dumps({"first": _extra_bytes(load), "again": _extra_bytes(load)}))


if __name__ == "__main__":
    main()
