"""Every script of bench/, examples/ and scripts/ runs: each benchmark at its smallest size.

Nothing is measured here. A benchmark must end with status 0 and print its table, so that a name of
the library that is renamed is noticed at once; the dearest of them are only imported, and run by a
soak. Peers that are not installed leave themselves out.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import holdfast
from holdfast.registry.store.address import Address
from holdfast.registry.ui import Source
from holdfast.registry.ui.pages import VIEWS
from tests.support.processes import run_apart, run_script, start_process
from tests.support.states import small_state

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
SMALL = "--rounds 1 --scale 0.001 --dir {dir}"
#: Benchmark -> its smallest size, and words of what it prints; more than one table has its own.
SMALLEST: dict[str, tuple[str, str]] = {
    "against": (f"--other {ROOT} {SMALL}", "this / other"),
    "blocked": (f"{SMALL} --without 'Lightning AsyncCheckpointIO'", "save_async / warm copy"),
    "bulk": ("--objects 400 --kib 1 --work sync --folder {dir}", "| `sync` .* yes |"),
    "chains": ("--saves 2 --scale 0.001 --dir {dir}", "deltas, 32, cached"),
    "collection": ("--objects 300", "300 objects: holdfast / list and unlink, per object:"),
    "dcp_metadata": ("2", "| 1 T |"),
    "follow": ("--mb 1 --rounds 1 --keyframe-every 2 --updates '1 %' --dir {dir}", "trusting"),
    "import_time": ("--rounds 1", "first read, CPU"),
    "growth": (
        "--commits 10 --live 5 --rounds 1 --tensors 10 --runs 2 --chunks 100 --dir {dir}",
        "peak of du",
    ),
    "lazy_slice": (
        f"--workload hydra {SMALL} --without 'pread at a known offset' 'holdfast zstd' "
        "'holdfast deltas' 'torch.load(mmap=True)'",
        "best peer: ",
    ),
    "manifest_load": ("'1.3 B'", "rows of all: "),
    "nights": ("--runs 2 --saves 1 2 --dir {dir}", "gc of the mirror"),
    "peak_memory": (
        "--workload hydra --ways raw --scale 0.001 --saves 1 --dir {dir}",
        "holdfast load, new: first",
    ),
    "policy_overhead": (
        "--stages 2 --dimension 4 --cuts 2 --saves 1 --every 1 --dir {dir}",
        "below 5% if an iteration takes",
    ),
    "save_load": (f"{SMALL} --without-memory", "import holdfast: median"),
    "sharded_plans": ("--models '1.3 B' --layouts FSDP2 --ranks 8", "| 1.3 B | FSDP2 | 8 |"),
    "sharded_saves": (
        "--workloads hydra --ranks 1 --stores folder --scale 0.001 --rounds 2 --without-processes",
        "ratio: to DCP's own writer",
    ),
    "storage": ("--saves 2 --ways raw --scale 0.01 --dir {dir}", "frozen network"),
    "thalia": ("--neurons 1000 --synapses 10 --rounds 1 --dir {dir}", "registry, fp16"),
    "tools_memory": ("--size '40 MB' --stored raw --tool stats --threads 1", "worst: "),
    "transports": (
        "--servers moto --ways plain --packs 1 --pack-bytes 4194304 --threads 1 --seconds 0.1",
        "s3fs, the better of both",
    ),
    "ui": ("--server moto --total 3 --runs 3 --checkpoints 2 --rounds 1", "health  "),
    "upkeep": ("--objects 300 --listed 4 --dir {dir}", "run ls, runs sealed"),
    "workloads": ("--scale 0.001", "parameters"),
}
#: They start servers, other processes or large libraries.
DEAR = ("against", "bulk", "lazy_slice", "peak_memory", "sharded_saves", "transports", "ui")
#: What runs or names each file of scripts/, beside the shell's own reading of it. `pin` and
#: `oldest` need the network, `soak` hours, and `screenshots` replaces a picture of the repository.
RUN_BY = {
    "bench": "CONTRIBUTING.md",
    "build_site.py": "tests/docs/test_site.py",
    "check": ".ci/run",
    "cost.py": "tests/cost/test_month.py",
    "demo": "CONTRIBUTING.md",
    "evidence": "docs/evidence.md",
    "evidence.py": "tests/docs/test_evidence.py",
    "figures.py": "scripts/bench",
    "fuzz": ".ci/run",
    "fuzz.py": "tests/registry/formats/test_fuzz.py",
    "memory": "scripts/check",
    "oldest": ".ci/run",
    "pin": "CONTRIBUTING.md",
    "pins.txt": "tests/test_pins.py",
    "quick.py": "tests/test_quick_check.py",
    "release": ".github/workflows/release.yml",
    "release.py": "tests/test_release.py",
    "screenshots": "CONTRIBUTING.md",
    "screenshots.py": "tests/test_scripts.py",
    "setup": ".ci/run",
    "site": "CONTRIBUTING.md",
    "slow": "CONTRIBUTING.md",
    "soak": "CONTRIBUTING.md",
    "wheel": ".ci/run",
    "wheel.py": "scripts/wheel",
}
#: What runs each folder of examples/.
EXAMPLES = {
    "curriculum": "tests/test_example.py",
    "c": "tests/test_example.py",
    "digits": "tests/test_example.py",
    "night": "tests/test_example.py",
    "mpi": "tests/registry/saving/collective/test_mpi.py",
    "notebook": "tests/test_notebook.py",
}


def run(path: Path, words: str, folder: Path, **more: str) -> str:
    """Run a script in a folder, as a user does from a shell; return what it printed."""
    for module in ("torch", "moto", "rich", "safetensors"):
        pytest.importorskip(module)
    done = subprocess.run(
        f"'{sys.executable}' '{path}' {words.format(dir=folder)}",
        shell=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_forked(path: Path, words: str, folder: Path) -> str:
    """Run a script in a folder, in a process that has imported torch; return what it printed."""
    for module in ("torch", "moto", "rich", "safetensors"):
        pytest.importorskip(module)
    printed = folder / "printed.txt"
    process = start_process(_in_folder, path, shlex.split(words.format(dir=folder)), printed)
    process.join(300)
    process.kill()
    assert process.exitcode == 0, printed.read_text()
    return printed.read_text()


def _in_folder(path: Path, words: list[str], printed: Path) -> None:
    os.chdir(printed.parent)
    os.environ |= {"TMPDIR": str(printed.parent), "OMP_NUM_THREADS": "1"}
    run_script(path, words, printed)


def _import_all(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    for name in DEAR:
        importlib.import_module(name)


def mains() -> set[str]:
    """Return the benchmarks that are run; the other files of bench/ are imported by them."""
    return {one.stem for one in BENCH.glob("*.py") if '"__main__"' in one.read_text()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.soak) if one in DEAR else one for one in SMALLEST],
)
def test_a_benchmark_runs_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    words, printed = SMALLEST[name]
    said = run_forked(BENCH / f"{name}.py", words, tmp_path)
    wanted = re.escape(printed).replace(re.escape(".*"), ".*")
    assert re.search(wanted, said), said


def test_the_dear_benchmarks_find_what_they_import() -> None:
    assert run_apart(_import_all, BENCH) == 0


def test_every_file_of_bench_runs() -> None:
    assert mains() == set(SMALLEST)
    imported = "\n".join(one.read_text() for one in BENCH.glob("*.py"))
    for one in BENCH.glob("*.py"):
        if one.stem not in SMALLEST:
            assert re.search(rf"^ *(from|import) {one.stem}\b", imported, re.MULTILINE), one


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("figures")


def test_the_page_of_figures_has_every_benchmark(figures: ModuleType) -> None:
    assert {*figures.BENCHMARKS, *figures.LEFT_OUT} == mains()
    page = figures.PAGE.read_text()
    for name in figures.BENCHMARKS:
        program = (BENCH / f"{name}.py").read_text()
        words = figures.command(name, 0.5, "FOLDER")
        assert f"\n## {name}\n" in page
        assert [word for word in words if word[:2] == "--" and f'"{word}"' not in program] == []


def test_tables_of_a_benchmark_become_tables_of_the_page(figures: ModuleType) -> None:
    said = """\
      hydra: seconds
┏━━━━━━━━━━━┳━━━━━━━━┓
┃ contender ┃ median ┃
┡━━━━━━━━━━━╇━━━━━━━━┩
│ copy      │  0.001 │
└───────────┴────────┘
      hydra:
      ratios
┏━━━━━━━━━━━┳━━━━━━━━┓
┃ ratio     ┃ median ┃
┡━━━━━━━━━━━╇━━━━━━━━┩
│ a_b /     │   1.25 │
│           │ to 1.5 │
│ c / copy  │   0.80 │
└───────────┴────────┘
\x1b[2m2026-11-28T17:38:04.194685Z\x1b[0m \x1b[33m WARN\x1b[0m not safe
| work | s |
|---|---:|
| sync | 1 |
it is <done>
| ratio | median | goal |
|---|---:|---:|
| load | 1.25 | 1.20 |
| save | 1.25 | 1.50 |
| sync | 1.25 |  |
import holdfast: median 199 ms, least 121, goal 150
       23.4 ms holdfast
"""
    assert list(figures.blocks(said)) == [
        "hydra: ratios",
        "| ratio | median |\n| --- | ---: |\n| a\\_b / | 1.25 to 1.5 |\n| c / copy | 0.80 |",
        "| work | s |\n| --- | ---: |\n| sync | 1 |",
        "it is \\<done>",
        "| ratio | median | goal |\n| --- | ---: | ---: |\n| load | 1.25 | 1.20 ! |\n"
        "| save | 1.25 | 1.50 |\n| sync | 1.25 |  |",
        "import holdfast: median 199 ms, least 121, goal 150 !",
    ]


def test_every_script_and_example_is_run_somewhere() -> None:
    assert {one.name for one in (ROOT / "scripts").iterdir() if one.is_file()} == set(RUN_BY)
    folders = {one.name for one in (ROOT / "examples").iterdir() if one.is_dir()}
    assert folders - {"__pycache__"} == set(EXAMPLES)
    for name, runner in {**RUN_BY, **EXAMPLES}.items():
        said = (ROOT / runner).read_text()
        assert name in said or Path(name).stem in said, f"{runner} does not run {name}"


@pytest.mark.parametrize(
    "script", sorted(name for name in RUN_BY if "." not in name), ids=lambda name: name
)
def test_a_script_is_read_by_the_shell(script: str) -> None:
    path = ROOT / "scripts" / script
    subprocess.run(["sh", "-n", str(path)], check=True, timeout=300)
    for named in re.findall(r"(?:sh|\.|python) (scripts/[\w.]+)", path.read_text()):
        assert (ROOT / named).exists(), f"{script} starts {named}"


def test_screenshots_know_every_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("playwright")
    pytest.importorskip("plotly")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import screenshots

    with holdfast.init(tmp_path / "registry") as reg:
        made = reg.create_run("run", seed=1)
        for step in (1, 2):
            made.save(small_state(step), step=step, metrics={"loss": 1 / step})
    source = Source.open(Address(tmp_path / "registry"))
    try:
        found = dict(screenshots.paths(source))
    finally:
        source.close()
    assert all(path.startswith("/") for path in found.values())
    assert set(found) <= {view.name for view in VIEWS}
    assert {"diff", "run", "runs", "checkpoint", "health"} <= set(found)


def test_the_mpi_job_of_one_rank(tmp_path: Path) -> None:
    """Where MPI is not installed: a communicator of one rank in its place."""
    (tmp_path / "mpi4py.py").write_text(
        "class Alone:\n"
        "    rank, size = 0, 1\n"
        "    def Dup(self): return self\n"
        "    def Barrier(self): pass\n"
        "    def Iprobe(self, status): return False\n"
        "class MPI:\n"
        "    COMM_WORLD, BYTE, Status = Alone(), None, object\n"
    )
    job = ROOT / "examples" / "mpi" / "job.py"
    said = [run(job, "registry", tmp_path, PYTHONPATH=str(tmp_path)) for _ in range(2)]
    assert [one.split()[4].rpartition("/")[2] for one in said] == ["step00000001", "step00000002"]
