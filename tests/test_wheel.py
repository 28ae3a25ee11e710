"""The wheel installs one name, and works in a project that has a `registry.py` of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed"),
    pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed"),
]

#: A program of a project with modules that are named like our folders.
PROGRAM = """
import backends, registry
assert registry.MINE and backends.MINE
import numpy as np
import holdfast
from holdfast.errors import NotFound, RegistryError

with holdfast.init("store", skip_race_probe=True) as opened:
    opened.create_run("run").save({"w": np.arange(3)}, step=1)
with holdfast.open("store") as opened:
    assert opened.checkpoint("run").load()["w"].tolist() == [0, 1, 2]
    try:
        opened.run("none")
    except NotFound as error:
        assert isinstance(error, RegistryError)
    else:
        raise SystemExit("found")
import fsspec  # it finds the file system by the entry point
files = fsspec.filesystem("holdfast", registry="store")
assert files.isfile("run/latest/w.safetensors")
print(holdfast.__file__)
"""


def build(target: str, folder: Path, checkout: Path = ROOT) -> Path:
    """Build a wheel or an sdist of a checkout."""
    folder.mkdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@dataclass(frozen=True)
class Built:
    """What was built and installed.

    Attributes:
        wheel: From the checkout.
        sdist: From the checkout.
        again: The wheel from the sdist.
        site: The folder in which the wheel is installed.
        project: A folder with a `registry.py` and a `backends/`.
    """

    wheel: Path
    sdist: Path
    again: Path
    site: Path
    project: Path

    def run(self, *words: str | Path) -> str:
        """Run Python in the project."""
        env = {**os.environ, "PYTHONPATH": str(self.site), "HOLDFAST_REGISTRY": "store"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.project,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("wheel")
    wheel, sdist = build("wheel", folder / "wheel"), build("sdist", folder / "sdist")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    again = build("wheel", folder / "again", unpacked)
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", site, wheel], check=True, timeout=300)
    project = folder / "project"
    (project / "backends").mkdir(parents=True)
    (project / "registry.py").write_text("MINE = True\n")
    (project / "backends" / "__init__.py").write_text("MINE = True\n")
    (project / "program.py").write_text(PROGRAM)
    return Built(wheel, sdist, again, site, project)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def test_the_wheel_holds_one_name_and_no_junk(built: Built) -> None:
    found = contents(built.wheel)
    tops = {name.partition("/")[0] for name in found}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"holdfast"}
    assert found["holdfast/py.typed"] == b""
    suffixes = {Path(name).suffix for name in found if name.startswith("holdfast/")}
    assert suffixes <= {".py", ".typed", ".toml", ".css", ".html", ".js"}
    with zipfile.ZipFile(built.wheel) as packed:
        assert not [one.filename for one in packed.infolist() if (one.external_attr >> 28) == 0xA]


def test_the_wheel_holds_every_module(built: Built) -> None:
    modules = {
        f"holdfast/{path.relative_to(ROOT)}"
        for folder in ("registry", "backends")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert modules <= set(contents(built.wheel))


def test_the_wheel_from_the_sdist_is_the_same(built: Built) -> None:
    assert contents(built.again) == contents(built.wheel)


def test_a_project_with_names_like_ours_saves_and_loads(built: Built) -> None:
    file = Path(built.run("program.py").strip())
    assert file == built.site / "holdfast" / "__init__.py"
    assert "run" in built.run("-m", "holdfast.registry.cli", "run", "ls")
    assert "run" in built.run(built.site / "bin" / "holdfast", "run", "ls")


def test_optional_libraries_are_named_by_extras(built: Built) -> None:
    name = next(name for name in contents(built.wheel) if name.endswith("/METADATA"))
    text = contents(built.wheel)[name].decode()
    extras = {line.partition(": ")[2] for line in text.splitlines() if "Provides-Extra" in line}
    assert {"all", "pool", "s3", "safetensors", "torch", "zarr"} <= extras


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="the steps of an image are root's")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python of the distribution")
def test_the_steps_of_the_dockerfile_make_a_command_for_a_user_without_rights(built: Built) -> None:
    text = (ROOT / "examples" / "night" / "Dockerfile").read_text().replace("\\\n", " ")
    steps = re.findall(r"^(ARG|RUN|ENV|USER|ENTRYPOINT|CMD) (.+)$", text, re.M)
    with tempfile.TemporaryDirectory() as place:
        image = Path(place)
        image.chmod(0o755)
        # Python of the distribution: another one may lie where that user may not read.
        subprocess.run(["/usr/bin/python3", "-m", "venv", image / "python"], check=True)
        env = {"PATH": f"{image}/python/bin:/usr/bin:/bin", "HOME": place}
        find = {"PIP_FIND_LINKS": str(built.wheel.parent)}
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        command, user = [], 0
        for kind, words in steps:
            here = words.replace("/state", f"{image}/state")
            if kind == "RUN":
                subprocess.run(["sh", "-ec", here], cwd=image, env=env | pip | find, check=True)
            elif kind in ("ARG", "ENV"):
                env |= dict(one.split("=", 1) for one in here.split())
            elif kind == "USER":
                user = int(here.split(":")[0])
            else:
                command += json.loads(here)
        assert command == ["holdfast", "--help"]
        assert user > 0
        for words in (["--help"], ["init", "state/registry"], ["care", "-r", "state/registry"]):
            subprocess.run(
                [image / "python" / "bin" / "holdfast", *words],
                cwd=image,
                env=env,
                user=user,
                group=user,
                check=True,
            )
        assert list((image / "state" / "holdfast").iterdir())  # it is remembered in the volume
        assert (image / "state" / "registry" / "registry.json").stat().st_uid == user
