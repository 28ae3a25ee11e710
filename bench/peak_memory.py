"""Peak memory of one load, measured in a process of its own.

The process allocates and touches the state to load into, resets the kernel's high-water mark of
its resident memory, loads, and reads the mark. Pages of a file that a peer maps count too, although
the kernel could take them back. `save_load.py` runs one process a contender, for the extra memory.

Run as a script it saves a history raw, compressed and with deltas, loads its last checkpoint both
ways, by `load()` and by `load_into`, and prints the peak as a ratio to the state's size: all memory
beyond the imports, the state itself included.

    python peak_memory.py [--workload W] [--ways WAY ...] [--scale S] [--saves N] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import peers
from memory import begin_peak, peak
from storage import WAYS
from workloads import WORKLOADS, State, blank, flatten, size_bytes

#: The highest ratio of the peak to the state's size.
GOAL = 1.15

Loader = Callable[[Path, str, State], None]


def measure(loader: str, workload: str, scale: float, at_rest: Path, ref: str) -> dict[str, int]:
    """Run this module in a new process; return extra bytes of a first and of a second load.

    Of the loader `FRESH` they include the state, which it brings into new memory.
    """
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
#: By `load()`, into new memory.
FRESH = "holdfast load, new"


def _loader(name: str) -> Loader:
    if name != HOLDFAST:
        return LOADERS[name]
    # Imported for this loader alone: the others must not pay for it.
    from holdfast_contender import load

    return lambda at_rest, ref, into: load(at_rest / "registry", ref, into)


def _extra_bytes(load: Callable[[], None]) -> int:
    before = begin_peak(trim=True)
    load()
    return peak() - before


def _load_fresh(at_rest: Path, ref: str) -> None:
    import holdfast

    with holdfast.open(at_rest / "registry", read_only=True) as opened:
        opened.checkpoint(ref).load()


def _child(options: argparse.Namespace) -> None:
    """Measure one loader in this process and print its figures."""
    if options.loader in (FRESH, HOLDFAST):
        import holdfast.registry.objects.codecs.blosc  # noqa: F401 - what imports take is not the load's
    if options.loader == FRESH:

        def load() -> None:
            _load_fresh(options.at, options.ref)
    else:
        target = blank(options.workload, options.scale)
        loader = _loader(options.loader)

        def load() -> None:
            loader(options.at, options.ref, target)

    print(json.dumps({"first": _extra_bytes(load), "again": _extra_bytes(load)}))


def _ratios(workload: str, options: argparse.Namespace, folder: Path) -> None:
    """Save a history in every way, load it in both, print the peaks."""
    import holdfast

    size = 0
    for name in options.ways:
        how, _ = WAYS[name]
        at = folder / name
        at.mkdir()
        training = WORKLOADS[workload](options.scale)
        with holdfast.init(at / "registry", **how) as opened:
            run = opened.create_run("run", seed=0)
            for number in range(options.saves):
                state = training.next_save() if number else training.state()
                run.save(state, step=number)
            size = size_bytes(flatten(state))
        del training, state
        for loader in (FRESH, HOLDFAST):
            figures = measure(loader, workload, options.scale, at, "run/latest")
            own = 0 if loader == FRESH else size
            shown = ", ".join(f"{which} {(own + n) / size:.3f}" for which, n in figures.items())
            print(f"{workload} {size / 1e6:.0f} MB, {name}, {loader}: {shown}", flush=True)
        shutil.rmtree(at)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak memory of a load.")
    parser.add_argument("--workload", choices=[*WORKLOADS, "both"], default="both")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=4, help="length of the history")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dir", type=Path, help="default: the temp folder")
    loaders = [HOLDFAST, FRESH, *LOADERS]
    parser.add_argument("--loader", choices=loaders, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ref", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loader:
        _child(options)
        return
    print(f"peak / state's size, goal {GOAL}")
    for workload in WORKLOADS if options.workload == "both" else [options.workload]:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.dir) as folder:
            _ratios(workload, options, Path(folder))


if __name__ == "__main__":
    main()
