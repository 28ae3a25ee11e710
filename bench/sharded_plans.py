"""How collective saves and loads grow with ranks and models: a simulated fleet, and the growth.

    python bench/sharded_plans.py [--models NAME ...] [--ranks N ...] [--layouts NAME ...]
        [--into FILE]
    python bench/sharded_plans.py --table FILE

Each combination is a process of its own. With `--into` each adds a line of JSON to a file, so that
a long table can be made in parts; `--table` prints such a file with the fitted growth: the exponent
of each column in the number of ranks, by least squares in logarithms. Seconds are of a processor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from architectures import ARCHITECTURES
from simulated_fleet import Figures, Fleet

RANKS = (8, 64, 1024, 8192)
#: By layout the ranks that share each row of a matrix.
LAYOUTS = {"FSDP2": 1, "FSDP2 x TP 8": 8}
COLUMNS = tuple(one.name for one in dataclasses.fields(Figures))


def measure(model: str, layout: str, ranks: int) -> dict[str, Any]:
    """Return a row of the table."""
    fleet = Fleet(ARCHITECTURES[model], ranks, LAYOUTS[layout])
    named = {"model": model, "layout": layout, "ranks": ranks}
    return named | dataclasses.asdict(fleet.run())


def growth(rows: Sequence[dict[str, Any]], column: str, over: str = "ranks") -> float | None:
    """Return the exponent b of `column ~ over ** b`, fitted by least squares in logarithms.

    Rows whose value is 0 do not count; `None` if fewer than two are left.
    """
    points = [(row[over], row[column]) for row in rows if row[column] > 0]
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, float)).T
    return float(np.polyfit(x, y, 1)[0])


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of each model and layout, with the exponents below them."""
    print(f"| model | layout | ranks | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---:|" * (1 + len(COLUMNS)))
    for model, layout in product(ARCHITECTURES, LAYOUTS):
        some = [one for one in rows if (one["model"], one["layout"]) == (model, layout)]
        some.sort(key=lambda one: one["ranks"])
        for row in some:
            print(_line(model, layout, f"{row['ranks']:,}", *(_short(row[c]) for c in COLUMNS)))
        fitted = [growth(some, column) for column in COLUMNS]
        if some:
            shown = ("" if one is None else f"{one:.2f}" for one in fitted)
            print(_line(model, layout, "exponent", *shown))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _short(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["1.3 B", "70 B"], choices=ARCHITECTURES)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.table is not None:
        print_table([json.loads(line) for line in asked.table.read_text().splitlines()])
        return
    if asked.one:
        print(json.dumps(measure(asked.models[0], asked.layouts[0], asked.ranks[0])))
        return
    rows = []
    for model, layout, ranks in product(asked.models, asked.layouts, asked.ranks):
        case = ["--models", model, "--layouts", layout, "--ranks", str(ranks), "--one"]
        command = [sys.executable, __file__, *case]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(line))
        if asked.into is not None:
            with asked.into.open("a") as file:
                file.write(line)
    print_table(rows)


if __name__ == "__main__":
    main()
