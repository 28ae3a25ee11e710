"""Run the benchmarks of bench/, and make one page of what they print: docs/figures.md.

Each is a process of its own, one after another. Its tables become tables of the page; tables of
bare seconds are left out, since only ratios to peers of the same run can be compared.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "figures.md"
_LIMIT_S = 1800
#: Colours of a terminal; lines of the logs of other programs; modules by the time that they take.
_ESCAPES = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_LEFT_OUT = re.compile(r"\d{4}-\d\d-\d\dT\S+ +(INFO|WARN|ERROR) |\s+[\d.]+ ms [\w.]+$")
#: Benchmark -> its options; a number behind `*` is multiplied by the scale.
#: What has goals keeps its scale of 1.
BENCHMARKS = {
    "save_load": "--workload hydra --rounds 5 --scale 1.0 --dir {dir}",
    "blocked": "--workload hydra --rounds 5 --scale 1.0 --dir {dir}",
    "import_time": "--rounds 5",
    "storage": "--saves 20 --scale *0.1 --dir {dir}",
    "chains": "--saves 17 --scale *0.1 --dir {dir}",
    "follow": "--mb *64 --rounds 4 --keyframe-every 4 --dir {dir}",
    "growth": "--commits 100 *5000 --rounds 3 --tensors 1000 *10000 --runs *100 --chunks *20000"
    " --dir {dir}",
    "collection": "--objects *3000",
    "nights": "--dir {dir}",
    "upkeep": "--objects *9900 --listed *1000 --places folder,{server} --dir {dir}",
    "transports": "--servers {server} --ways plain,latency --packs 2 --pack-bytes 16777216"
    " --seconds 10",
    "manifest_load": "'1.3 B'",
    "sharded_plans": "--models '1.3 B' --ranks 8 64",
    "dcp_metadata": "2 8",
    "peak_memory": "--workload hydra --ways raw zstd --saves 2 --scale *0.5 --dir {dir}",
    "lazy_slice": "--workload hydra --rounds 5 --scale 1.0 --dir {dir}",
    "sharded_saves": "--workloads hydra --ranks 2 --stores folder --rounds 5 --scale 1.0",
    "bulk": "--objects 400 --kib 4 --folder {dir}",
    "tools_memory": "--size '40 MB' --stored raw --stored deltas --threads 2",
    "ui": "--server {server} --total *100 --runs *10 --checkpoints 20",
    # of single systems
    "policy_overhead": "--stages *20 --dimension *400 --saves 6 --dir {dir}",
    "thalia": "--neurons *100000 --rounds 1 --dir {dir}",
}
#: Those that are not of the page, and why.
LEFT_OUT = {
    "against": "it compares two checkouts of Holdfast",
    "workloads": "it prints the sizes of the states that the others save",
}
_HEAD = """# Figures

<!-- `sh scripts/bench` writes this page; do not edit it. -->

{machine}

The figures are medians of one run of [bench/](../bench), with the peers beside Holdfast in the
same rounds. So the ratios count: seconds and rates belong to this machine and this hour. `x / y` is
what x takes divided by what y takes: below 1, x is faster or smaller. The goals are for scale 1 on
a machine that does nothing else: `save_load`, `blocked`, `lazy_slice` and `sharded_saves` always
run at scale 1. At a smaller scale states are small, so that what a save or a load costs at any size
weighs more; and other jobs disturb most what uses several threads. Goals marked ! are missed
in this run. `sh scripts/bench` makes this page on your machine.
"""


def command(name: str, scale: float, folder: str) -> list[str]:
    """Return the options of a benchmark at a scale."""

    def scaled(found: re.Match[str]) -> str:
        number = found[1]
        return (
            f"{float(number) * scale:g}" if "." in number else str(max(int(int(number) * scale), 2))
        )

    words = re.sub(r"\*([\d.]+)", scaled, BENCHMARKS[name])
    server = "radosgw" if shutil.which("radosgw") else "moto"
    return shlex.split(words.format(dir=folder, server=server))


def blocks(said: str) -> Iterator[str]:
    """Yield the tables and the lines that a benchmark has printed, as Markdown."""
    waiting: list[str] = []
    rows: list[list[str]] = []
    is_box = False
    for line in [*filter(_is_shown, _ESCAPES.sub("", said).splitlines()), ""]:
        first = line[:1] or " "
        if rows and (first == "┏" or first not in ("┃│┡├└" if is_box else "|")):
            title = _pop_title(waiting)
            yield from _text(waiting)
            if not title.endswith(": seconds"):
                yield from [_escaped(title)] * bool(title)
                yield _table(rows)
            waiting, rows = [], []
        if first in "┃│":
            is_box = True
            _add(rows, [cell.strip() for cell in re.split("[┃│]", line)[1:-1]])
        elif first == "|":
            is_box = False
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
        elif first not in "┏┡├└" and line.strip():
            waiting.append(line.rstrip())
    yield from _text(waiting)


def _is_shown(line: str) -> bool:
    return _LEFT_OUT.match(line) is None


def _pop_title(lines: list[str]) -> str:
    """Take the title of a table from the lines before it; a centered one may have several."""
    title = [lines.pop()] if lines else []
    while title and title[0].startswith(" ") and lines and lines[-1].startswith(" "):
        title.insert(0, lines.pop())
    return " ".join(map(str.strip, title))


def _text(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines as paragraphs; of more than two the columns stay below each other."""
    if len(lines) > 2:
        printed = "\n".join(lines)
        yield f"<!-- not run: the benchmark has printed it -->\n```text\n{printed}\n```"
    else:
        yield from (_escaped(_judged(line.strip())) for line in lines)


def _judged(line: str) -> str:
    """Mark the goal in a line if its first figure is above it."""
    found = re.search(r"[ :]([\d.]+\d|\d)\b.*\bgoal ([\d.]+)$", line)
    return line + " !" if found and float(found[1]) > float(found[2]) else line


def _add(rows: list[list[str]], cells: list[str]) -> None:
    """Add a row, or what a row continues in its next line."""
    if rows and not cells[0] and len(rows[-1]) == len(cells):
        rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    else:
        rows.append(cells)


def _table(rows: Sequence[list[str]]) -> str:
    head, *rest = rows
    if {"median", "goal"} <= set(head):
        middle, goal = head.index("median"), head.index("goal")
        for row in rest:
            if row[goal].strip("-:") and float(row[middle]) > float(row[goal]):
                row[goal] += " !"
    if not (rest and set("".join(rest[0])) <= set("-:")):
        rest = [["---", *["---:"] * (len(head) - 1)], *rest]
    return "\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in (head, *rest))


def _escaped(text: str) -> str:
    return re.sub(r"([<\[*_~])", r"\\\1", text)


def section(name: str, scale: float, folder: str) -> tuple[str, bool]:
    """Run a benchmark; return its part of the page, and whether it ended well."""
    path = ROOT / "bench" / f"{name}.py"
    options = command(name, scale, folder)
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, path, *options],
            cwd=folder,
            env={**os.environ, "TMPDIR": folder, "ICECHUNK_LOG": "error"},  # it warns on stdout
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        said, error = done.stdout, f"it ended with status {done.returncode}" * bool(done.returncode)
        complained = done.stderr
    except subprocess.TimeoutExpired:
        said, error, complained = "", f"it took longer than {_LIMIT_S} s", ""
    print(f"{name}: {time.monotonic() - begun_s:.0f} s{error and ', ' + error}", flush=True)
    if error:
        print(complained, file=sys.stderr)
    shown = shlex.join(options).replace(folder, "FOLDER")
    purpose = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    parts = [f"## {name}", purpose, f"`python bench/{name}.py {shown}`"]
    parts += [f"Not measured: {error}."] if error else blocks(said.replace(folder, "FOLDER"))
    return "\n\n".join(parts), not error


def machine(scale: float) -> str:
    """Return what the figures were measured on and when."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = named[1] if named else platform.machine()
    rows = {
        "date": f"{datetime.now(UTC):%d %B %Y}",
        "commit": _git("rev-parse", "--short=12", "HEAD")
        + (", with changes" if _git("status", "--porcelain", "-uno") else ""),
        "processor": f"{len(os.sched_getaffinity(0))} cores, {processor}",
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "others at work": f"load average {os.getloadavg()[2]:.1f} in the 15 minutes before",
        "scale": f"{scale:g}",
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {said} |" for name, said in rows.items())]
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Run the benchmarks, and write the page or print a part of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the usual sizes")
    parser.add_argument("--dir", type=Path, help="on the disk to be measured; default: temporary")
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, help="print these sections")
    options = parser.parse_args()
    head = _HEAD.format(machine=machine(options.scale)).rstrip()
    names = options.only or [*BENCHMARKS]
    made = {name: f"## {name}\n\nNot measured: the run was stopped before." for name in names}
    is_well = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.dir) as folder:
            made[name], ended_well = section(name, options.scale, folder)
        is_well &= ended_well
        if not options.only:  # after each, so that a run that is stopped has a page
            PAGE.write_text("\n\n".join([head, *made.values()]) + "\n")
    if options.only:
        print("\n\n".join([head, *made.values()]))
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
