"""Saving and loading on a local disk, Holdfast beside its yardsticks and peers, in one run.

Every round runs every contender once, in an order of its own; see `rounds.py`. Saves write a state
in which every chunk is new into a fresh folder; nothing outlives the run. Absolute figures belong
to the machine, ratios are what counts: a durable save against a plain write and fsync of the same
bytes (and against SHA-256 on all cores, where hashing is slower than the disk), an unchanged
save and a verified load against SHA-256, a blocked save_async against a warm copy.

    python bench/save_load.py --workload hydra --rounds 7 --dir /var/tmp --json figures.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import peak_memory
import peers
from import_time import import_seconds, slowest_parts
from rich.console import Console
from rounds import Comparison, Contender, Report, print_ratios, print_times, run_rounds
from scene import Scene
from workloads import WORKLOADS

PLAIN, HASHED, SHA256, COPY = "plain write", "hash and write", "SHA-256", "warm copy"
ROUNDS = {"hydra": 7, "lm": 3}
#: Ratios to reach, by workload.
SAVE_GOAL = {"hydra": 1.25, "lm": 1.3}
UNCHANGED_GOAL = {"hydra": 1.5, "lm": 1.1}
LOAD_GOAL = {"hydra": 1.5, "lm": 1.2}
IMPORT_GOAL_S = 0.150
CODECS = ("none", "lz4", "zstd", "auto")


def save_peers(scene: Scene) -> list[Contender]:
    """Return the yardsticks and peers of a durable save."""
    tensors, fresh = scene.moving_tensors, scene.fresh

    def save(name: str, act: Callable[[], Any]) -> Contender:
        return Contender(name, act, scene.before_save, scene.after_save)

    return [
        save(PLAIN, lambda: peers.plain_write(tensors, fresh / "plain")),
        save(HASHED, lambda: peers.hashed_write(tensors, fresh)),
        save("torch.save + SHA-256", lambda: peers.torch_save(scene.moving, fresh / "state.pt")),
        save("safetensors save", lambda: peers.safetensors_save(tensors, fresh / "safetensors")),
        Contender(SHA256, lambda: peers.sha256(tensors)),
        Contender(COPY, peers.Copy(tensors)),
    ]


def load_peers(scene: Scene) -> list[Contender]:
    """Save the kept state by every peer and return how each loads it."""
    at_rest, into = scene.at_rest, scene.target_tensors
    plain, archive, tensors = at_rest / "plain", at_rest / "state.pt", at_rest / "state.safetensors"
    peers.plain_write(scene.kept_tensors, plain)
    peers.torch_save(scene.kept, archive)
    peers.safetensors_save(scene.kept_tensors, tensors)
    loads: list[tuple[str, Path, Callable[[], Any]]] = [
        ("plain read", plain, lambda: peers.plain_read(plain, into)),
        ("read and hash", plain, lambda: peers.hashed_read(plain, into)),
        ("torch.load", archive, lambda: peers.torch_load(archive, into)),
        ("safetensors load", tensors, lambda: peers.safetensors_load(tensors, into)),
    ]
    return [
        Contender(
            f"{name}, cold" if cold else name,
            act,
            partial(scene.before_load, path, cold=cold),
            scene.after_load,
        )
        for name, path, act in loads
        for cold in (False, True)
    ]


def peer_comparisons() -> list[Comparison]:
    """Return the ratios that need no Holdfast."""
    return [
        Comparison(HASHED, (PLAIN,)),
        Comparison("safetensors save", (PLAIN,)),
        Comparison("torch.save + SHA-256", (PLAIN,)),
        Comparison(SHA256, (PLAIN,)),
        Comparison("read and hash", (SHA256,)),
        Comparison("safetensors load", (SHA256,)),
        Comparison("read and hash, cold", ("safetensors load, cold",)),
    ]


def holdfast_comparisons(workload: str) -> list[Comparison]:
    """Return Holdfast's ratios, with the goals of a workload."""
    return [
        Comparison("holdfast save", (PLAIN,), SAVE_GOAL[workload]),
        Comparison("holdfast save", (PLAIN, SHA256)),
        Comparison("holdfast save", (HASHED,)),
        Comparison("holdfast save", ("safetensors save",)),
        Comparison("holdfast save", ("torch.save + SHA-256",)),
        Comparison("holdfast save, with history", (PLAIN,), SAVE_GOAL[workload]),
        Comparison("holdfast save, unchanged", (SHA256,), UNCHANGED_GOAL[workload]),
        Comparison("holdfast save_async, blocked", (COPY,), 1.3),
        Comparison("holdfast load", (SHA256,), LOAD_GOAL[workload]),
        Comparison("holdfast load", ("read and hash",)),
        Comparison("holdfast load", ("safetensors load",)),
        Comparison("holdfast load, cold", ("safetensors load, cold",), 1.05),
        Comparison("holdfast load, cold", ("read and hash, cold",)),
    ]


def measure(workload: str, options: argparse.Namespace, console: Console) -> Report:
    """Measure one workload in a folder of its own, and print it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        return _measure_in(folder, workload, options, console)
    finally:
        shutil.rmtree(folder)


def _measure_in(
    folder: Path, workload: str, options: argparse.Namespace, console: Console
) -> Report:
    scene = Scene.of(workload, options.scale, folder)
    contenders, comparisons = save_peers(scene) + load_peers(scene), peer_comparisons()
    loaders, ref = list(peak_memory.LOADERS), ""
    if not options.peers_only:
        # Imported here so that the peers can be measured without Holdfast.
        from holdfast_contender import Holdfast

        holdfast = Holdfast(scene)
        contenders += holdfast.contenders()
        comparisons = holdfast_comparisons(workload) + comparisons
        loaders, ref = [peak_memory.HOLDFAST, *loaders], holdfast.ref
    times, cpu = run_rounds(contenders, options.rounds or ROUNDS[workload])
    report = Report(workload, scene.size_bytes, times, cpu)
    report.ratios = {each.label: each.ratios(times) for each in comparisons}
    print_times(report, console)
    print_ratios(report, comparisons, console)
    if not options.without_memory:
        report.extra["peak extra bytes of a load"] = {
            name: peak_memory.measure(name, workload, options.scale, scene.at_rest, ref)
            for name in loaders
        }
        _print_memory(report, console)
    if not options.peers_only:
        holdfast.close()
    return report


def measure_codecs(workload: str, options: argparse.Namespace, console: Console) -> Report:
    """Measure the compressions beside each other, and print what each takes and costs."""
    from holdfast_contender import Compressed

    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        scene = Scene.of(workload, options.scale, folder)
        all_of = {how: Compressed(scene, how) for how in CODECS}
        contenders = [one for each in all_of.values() for one in each.contenders()]
        times, cpu = run_rounds(contenders, options.rounds or ROUNDS[workload])
        for each in all_of.values():
            each.close()
    finally:
        shutil.rmtree(folder)
    report = Report(workload, scene.size_bytes, times, cpu)
    comparisons = [
        Comparison(f"{act}, {how}", (f"{act}, {to}",))
        for act in ("save", "load")
        for how, to in (*((how, "none") for how in CODECS[1:]), ("auto", "zstd"))
    ]
    report.ratios = {each.label: each.ratios(times) for each in comparisons}
    report.extra["stored bytes"] = {how: each.stored_bytes for how, each in all_of.items()}
    print_times(report, console)
    print_ratios(report, comparisons, console)
    for how, stored in report.extra["stored bytes"].items():
        console.print(f"{how}: {stored / 1e6:.1f} MB, {stored / scene.size_bytes:.3f} of the state")
    return report


def _print_memory(report: Report, console: Console) -> None:
    for name, extra in report.extra["peak extra bytes of a load"].items():
        parts = ", ".join(
            f"{which} {size / 1e6:.0f} MB ({size / report.size_bytes:.0%})"
            for which, size in extra.items()
        )
        console.print(f"peak extra memory, {name}: {parts}")


def _print_import(console: Console, rounds: int) -> list[float]:
    seconds = import_seconds("holdfast", rounds)
    middle, least = median(seconds) * 1e3, min(seconds) * 1e3
    goal = IMPORT_GOAL_S * 1e3
    console.print(f"import holdfast: median {middle:.0f} ms, least {least:.0f}, goal {goal:.0f}")
    for name, cumulative in slowest_parts("holdfast"):
        console.print(f"    {cumulative * 1e3:7.1f} ms {name}")
    return seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure saving and loading on a local disk.")
    parser.add_argument("--workload", choices=[*WORKLOADS, "both"], default="hydra")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--dir", type=Path, help="on a real disk; default: the temp folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--codecs", action="store_true", help="only the compressions of Holdfast")
    parser.add_argument("--peers-only", action="store_true", help="leave Holdfast out")
    parser.add_argument("--without-memory", action="store_true", help="leave peaks of loads out")
    return parser.parse_args()


def main() -> None:
    options, console = _options(), Console(width=120)
    names = list(WORKLOADS) if options.workload == "both" else [options.workload]
    act = measure_codecs if options.codecs else measure
    reports = [act(name, options, console) for name in names]
    figures: dict[str, Any] = {"workloads": [dataclasses.asdict(each) for each in reports]}
    if not options.peers_only and not options.codecs:
        figures["import holdfast, seconds"] = _print_import(console, max(5, options.rounds or 0))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
