"""What a run's history takes on disk: 20 Hydra saves with all that hangs on them, beside files.

Each save has the KL anchor beside it and lets a copy of the model into the opponent pool; two of
the saves become gates, and one frozen network is shared by all. The plain files are what a folder
of `torch.save` files holds: one for every checkpoint, anchor, pool copy, gate and network. Holdfast
keeps it three times: raw, compressed, and with deltas against the save before. Bytes are those of
the files, counted after every step; nothing is timed.

    python storage.py [--saves N] [--ways WAY ...] [--scale S] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from workloads import frozen, hydra, pool_copy

import holdfast

#: Options of `holdfast.init`, and the highest ratio to the plain files that is good enough.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "raw": ({}, 0.68),
    "zstd": ({"compression": "zstd"}, 0.55),
    "deltas": ({"compression": "zstd", "keyframe_every": 8}, 0.50),
}
ROWS = ("checkpoints", "KL anchors", "pool copies", "gates", "frozen network")


def plain_files(folder: Path, saves: int, scale: float) -> Counter[str]:
    """Write the history as files; return their bytes by what they are."""
    sizes: Counter[str] = Counter()
    shared = frozen(scale)

    def keep(row: str, name: str, state: Any) -> None:
        path = folder / name
        torch.save(state, path)
        sizes[row] += path.stat().st_size
        path.unlink()

    keep("frozen network", "grp.pt", shared["grp"])
    for number, state in enumerate(_history(saves, scale)):
        keep("checkpoints", f"ckpt_{number}.pt", state)
        keep("KL anchors", f"anchor_{number}.pt", shared["kl_anchor"])
        keep("pool copies", f"pool_v{number:04d}.pt", pool_copy(state))
        if number in _gates(saves):
            keep("gates", f"gate_{number}.pt", state)
    return sizes


def in_registry(folder: Path, saves: int, scale: float, **options: Any) -> Counter[str]:
    """Keep the same history in a registry; return the bytes by which each step made it grow."""
    sizes: Counter[str] = Counter()
    shared = frozen(scale)
    with holdfast.init(folder / "registry", **options) as reg:
        run = reg.create_run("hydra", seed=0)

        @contextmanager
        def counted(row: str) -> Iterator[None]:
            before = _bytes_in(folder)
            yield
            sizes[row] += _bytes_in(folder) - before

        with counted("frozen network"):
            run.pins.artifacts.set("grp", shared["grp"])
        for number, state in enumerate(_history(saves, scale)):
            with counted("checkpoints"):
                ck = run.save(
                    state, step=state["global_step"], companions={"kl_anchor": shared["kl_anchor"]}
                )
            if number == 0:
                packs = ck.companion("kl_anchor").handle.reader.placement.packs
                sizes["KL anchors"] = sum(pack.size_bytes for pack in packs)
                sizes["checkpoints"] -= sizes["KL anchors"]
            with counted("pool copies"):
                run.pool.promote(ck)
            if number in _gates(saves):
                with counted("gates"):
                    run.pins.gates.set(f"gate{number}", ck)
        if not reg.verify(deep=True).ok:
            raise SystemExit("the registry is not sound; its size means nothing")
    return sizes


def _history(saves: int, scale: float) -> Iterator[dict[str, Any]]:
    training = hydra(scale)
    yield training.state()
    for _ in range(saves - 1):
        yield training.next_save()


def _gates(saves: int) -> set[int]:
    return {saves // 3, saves - 1}


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _measured(measure: Callable[..., Counter[str]], options: Any, **more: Any) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.dir) as folder:
        return measure(Path(folder), options.saves, options.scale, **more)


def main() -> None:
    """Measure all of them and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dir", type=Path, help="default: the temp folder")
    options = parser.parse_args()
    plain = _measured(plain_files, options)
    ours = {name: _measured(in_registry, options, **WAYS[name][0]) for name in options.ways}
    table = Table(
        title=f"bytes after {options.saves} Hydra saves, MB, and the ratio to plain files"
    )
    for column in ("what", "plain files", *(part for name in ours for part in (name, "x"))):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in (*ROWS, "total"):
        files, *kept = (
            sum(sizes.values()) if row == "total" else sizes[row]
            for sizes in (plain, *ours.values())
        )
        cells = [cell for size in kept for cell in (f"{size / 1e6:,.2f}", f"{size / files:.3f}")]
        table.add_row(row, f"{files / 1e6:,.2f}", *cells)
    goals = [cell for name in ours for cell in ("", f"{WAYS[name][1]:.2f}")]
    table.add_row("goal", "", *goals)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
