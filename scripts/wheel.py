"""Install the wheel into clean environments, and use there what each extra is for.

Run it by `sh scripts/wheel`. It prints the seconds that pip takes, those of a user where its cache
is warm, and the megabytes of the packages that came. torch comes first, by the version that
`scripts/setup` names, since an index may serve a build for GPUs otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("PYTHON") or sys.executable
#: Extras that bring torch.
WITH_TORCH = ("torch", "lightning", "transformers", "all")
#: No package of these may come without an extra.
HEAVY = ("torch", "boto3", "s3fs", "adlfs", "gcsfs", "zarr", "starlette", "uvicorn", "plotly")

FIRST = """
import os, sys
import numpy as np
import holdfast
reg = holdfast.init(sys.argv[1], skip_race_probe=True)
state = {"model": {"w": np.arange(1000.0)}, "lr": 1e-3}
reg.create_run("run").save(state, step=1, metrics={"loss": 0.5})
with holdfast.open(sys.argv[1]) as again:
    assert again.run("run").restore().state["model"]["w"].tolist() == list(range(1000))
    assert again.verify(deep=True).ok
"""
LEAN = f"""
from importlib.util import find_spec
came = [name for name in {HEAVY!r} if find_spec(name)]
assert not came, came
"""
MODEL = """
import torch
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
def train_step(step):
    loss = (model(torch.full((4, 64), step / 300.0)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())
"""
BUCKET = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')\n"
#: What an extra is for, as a program; `reg` is a registry with a checkpoint `run/latest`.
USES = {
    "torch": "import torch; run.save({'w': torch.ones(3)}, step=2)",
    "safetensors": "",
    "s3": "",
    "fast": "from holdfast.backends import open_backend\n"
    "open_backend('s3://bucket/x', {'anon': True}, transport='obstore')",
    "azure": "from holdfast.backends import open_backend\n"
    "open_backend('az://container/x', {'connection_string': 'UseDevelopmentStorage=true'})",
    "gs": "from holdfast.backends import open_backend\n"
    "open_backend('gs://bucket/x', {'token': 'anon'})",
    "pool": "run.pool.promote(run.latest()); run.pool.record_match([1, None], [1, 2])",
    "system": "run.log({}, step=2, system=True); run.save({'w': 1.0}, step=2)\n"
    "assert 'system/memory_percent' in run.streams['log'].read()[0]",
    "jax": "import jax.numpy as jnp; run.save({'w': jnp.ones(3)}, step=2)",
    "lightning": "from holdfast.lightning import HoldfastCheckpoint; HoldfastCheckpoint(run)",
    "transformers": "from holdfast.transformers import HoldfastCallback; HoldfastCallback(run)",
    "wandb": "import wandb, holdfast.wandb\n"
    "holdfast.wandb.log(run.latest(), run=wandb.init(mode='offline'))",
    "zarr": "assert run.latest().zarr()['model/w'][3] == 3",
    "pyarrow": "assert reg.runs_table().num_rows == 1",
    "dask": "from distributed import Client\n"
    "assert reg.verify(deep=True, executor=Client(processes=False).get_executor()).ok",
    "formats": "about = dict.fromkeys(('float', 'int', 'format', 'version', 'settings'), '-')\n"
    "holdfast.formats.write('record.mpk', {'metadata': about, 'item': {'x': 1}})\n"
    "import flatbuffers, lz4.frame",
    "ui": "import starlette, uvicorn; from holdfast.registry.cli.app import app\n"
    "app(['page', 'run', '-r', sys.argv[1], '--to', 'page.html'])",
    "all": "import torch, boto3, zarr, openskill, pyarrow, starlette",
}


def main(extras: Sequence[str]) -> None:
    """Try the wheel without extras and with these; `all-extras` is every one for users."""
    if list(extras) == ["all-extras"]:
        offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = [name for name in offered["optional-dependencies"] if name in USES]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        wheel = build(folder / "dist")
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        try_bare(folder, wheel)
        for extra in extras or ["torch,s3"]:
            try_extra(folder, wheel, extra)


def build(folder: Path) -> Path:
    """Build the wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_bare(folder: Path, wheel: Path) -> None:
    """Try the wheel without extras: nothing heavy comes, and the README's first minute works."""
    with environment(folder, wheel, "") as python:
        run(folder, python, LEAN)
        (printed,), commands = readme("text"), "".join(readme("sh"))
        found = run(folder, python, readme("python")[0])
        if found != printed:
            raise SystemExit(f"the README prints:\n{printed}and the wheel:\n{found}")
        typed = re.findall(r"^holdfast (.* first)(?: +# (.*))?$", commands, re.M)
        for line, says in (("--help", ""), ("--version", ""), *typed):
            command = [python.with_name("holdfast"), *line.split()]
            done = subprocess.run(
                command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            if says not in done.stdout:
                raise SystemExit(f"holdfast {line}: the README says {says}\n{done.stdout}")


def try_extra(folder: Path, wheel: Path, extra: str) -> None:
    """Try what an extra is for; with torch and s3 the lines of the README."""
    with environment(folder, wheel, extra) as python:
        if extra == "torch,s3":
            lines = MODEL + readme("python")[1]
            run(folder, python, f"import holdfast; holdfast.init('checkpoints')\n{lines}")
            with s3():
                init = "import holdfast; holdfast.init('s3://bucket/a')\n"
                run(
                    folder,
                    python,
                    BUCKET + init + lines.replace('"checkpoints"', '"s3://bucket/a"'),
                )
        elif extra == "s3":
            with s3():
                lines = readme("python")[0].replace('"first"', '"s3://bucket/a"')
                run(folder, python, BUCKET + lines)
        else:
            ending = "run = reg.run('run')\nrun.restore()\n" + USES[extra]
            run(folder, python, f"{FIRST}\n{ending}", f"store-{extra}")


def readme(language: str) -> list[str]:
    """Return the README's blocks of a language; the first two of Python: a minute, and a loop."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(folder: Path, python: Path, program: str, *words: str) -> str:
    """Run a program with the installed wheel; return what it printed."""
    command = [python, "-I", "-W", "error::ImportWarning", "-c", program, *words]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def environment(folder: Path, wheel: Path, extra: str) -> Iterator[Path]:
    """Install the wheel into an environment; print the seconds and megabytes; return its Python."""
    place = folder / "environment"
    subprocess.run([PYTHON, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    before, began = size(place), time.monotonic()
    if set(extra.split(",")) & set(WITH_TORCH):
        (torch,) = re.findall(r'"(torch==[\d.]+)"', (ROOT / "scripts" / "setup").read_text())
        subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, f"{wheel}[{extra}]" if extra else str(wheel)], check=True)
    took_s = time.monotonic() - began
    name = f"holdfast-registry[{extra}]" if extra else "holdfast-registry"
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    print(
        f"{version.stdout.strip()}: {name}: {took_s:.0f} s, {(size(place) - before) / 1e6:.0f} MB",
        flush=True,
    )
    yield python
    shutil.rmtree(place)


def size(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


@contextmanager
def s3() -> Iterator[None]:
    """Serve S3 on this machine, and let programs find it."""
    # Plain moto may let two of many exclusive creates win, which `init` refuses.
    command = [sys.executable, "-W", "ignore", "-m", "tests.servers.moto_process"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    if not port:
        raise SystemExit("the S3 server did not start")
    here = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(here)
    try:
        yield
    finally:
        for name in here:
            os.environ.pop(name, None)
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
