"""The names that users build on: few, sorted, all there, and cheap to import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import holdfast
import holdfast.backends

HEAVY = {
    *("torch", "boto3", "botocore", "s3fs", "fsspec", "obstore", "safetensors", "loading.zarr"),
    *("ml_dtypes", "sklearn", "moto", "typer", "rich", "pyarrow", "plotly", "IPython"),
}


@pytest.mark.parametrize(
    "package", [holdfast, holdfast.backends], ids=lambda package: package.__name__
)
def test_all_is_sorted_and_without_doubles(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(set(package.__all__))


def test_the_surface_is_small() -> None:
    assert len(holdfast.__all__) <= 20


def test_all_is_what_the_package_defines() -> None:
    """What is bound in the package and neither a module nor private is promised, and vice versa."""
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)  # loads what is lazy
    lazy = {"TYPE_CHECKING", "at_first_use"}
    names = {
        name
        for name, value in vars(holdfast).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert names - lazy == set(holdfast.__all__)


@pytest.mark.parametrize(
    ("program", "now"),
    [("holdfast.Old", "Retention"), ("None; from holdfast import Old as found", "rng.Batches")],
)
def test_an_old_name_works_and_says_the_new_one(
    monkeypatch: pytest.MonkeyPatch, program: str, now: str
) -> None:
    monkeypatch.setitem(vars(holdfast)["_RENAMED"], "Old", (now, "0.3"))
    said = f"holdfast.Old is now holdfast.{now}; the old name ends in version 0.3"
    code = compile(f"found = None\nfound = {program}", "user.py", "exec")
    for _ in range(2):  # each use, at the line that uses it
        names: dict[str, object] = {"holdfast": holdfast}
        with pytest.warns(DeprecationWarning, match=f"^{said}$") as warned:
            exec(code, names)
        assert (warned[0].filename, warned[0].lineno) == ("user.py", 2)
        assert names["found"] is attrgetter(now)(holdfast)
    assert "Old" not in dir(holdfast)


def test_all_of_the_backends_is_there() -> None:
    assert set(holdfast.backends.__all__) <= set(vars(holdfast.backends))


@pytest.mark.parametrize("name", holdfast.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    assert (getattr(holdfast, name).__doc__ or "").strip()


def test_errors_are_all_exported_and_of_one_root() -> None:
    errors = importlib.import_module("holdfast.registry.errors")
    assert list(errors.__all__) == sorted(errors.__all__)
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), holdfast.RegistryError) for name in defined)
    assert all(getattr(errors, name).exit_code > 0 for name in defined)


def loaded_by(program: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    program = f"import json, sys\n{program}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def rooms_of(modules: set[str]) -> set[str]:
    parts = [name.split(".") for name in modules if name.startswith("holdfast.registry.")]
    return {words[2] for words in parts}


def test_import_loads_nothing_heavy() -> None:
    loaded = loaded_by("import holdfast; holdfast.open")
    assert {name.partition(".")[0] for name in loaded} & {*HEAVY, "numpy"} == set()
    assert rooms_of(loaded) & {"formats", "loading", "writing"} == set()
    assert late_in(loaded) == set()
    assert rooms_of(loaded_by("import holdfast")) <= {"values"}


def test_dir_shows_public_names_and_modules_alone_and_each_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(holdfast.__file__ or "").parent
    modules = {"formats", *(path.stem for path in folder.glob("*.py"))} - {"__init__"}
    shown = {name for name in dir(holdfast) if not name.startswith("__")}
    assert shown == {*holdfast.__all__, *modules}
    light = ("distributed", "errors", "filesystem", "formats", "ipython", "rng")
    uses = "; ".join(f"assert holdfast.{name}.__all__" for name in light)
    assert "torch" not in loaded_by(f"import holdfast; {uses}")
    # The others import what they wrap.
    monkeypatch.setattr("holdfast.registry.values.first_use.import_module", str)
    assert {holdfast.__getattr__(name) for name in modules} == {f"holdfast.{m}" for m in modules}


#: Rooms and modules that a read does not need, besides the door of a room.
LATE = (
    *("comparing", "curation", "deriving", "face.run", "formats", "layouts", "tables", "upkeep"),
    *("loading.destinations", "loading.files", "loading.fit"),
    *("loading.following", "loading.selecting", "loading.zarr", "pytree.containers"),
    *("history.creating", "history.holds", "history.writer_token", "loading.tensors"),
    *("pytree.flattening", "saving", "spec.migrations", "spec.precision", "spec.presets"),
    *("spec.requirements", "store.chunk_cache", "store.progress", "values.markup", "writing"),
)
#: Of other libraries, and of Python: what only some calls need.
NOT_FOR_READING = {
    *("pydantic", "fsspec", "rich", "typer", "numcodecs", "tomllib", "yaml", "html", "uuid"),
    *("zoneinfo", "socket", "difflib", "pydantic_core", "typing_extensions"),
}


#: Modules of ours that a first read imports, and dataclasses that are made for it. Each of these
#: compiles about eight functions: raise the numbers only for what a read of one tensor needs.
MOST_MODULES, MOST_DATACLASSES = 96, 5
#: What the commands that only show something need not import.
LATE_IN_COMMANDS = ("comparing.state_diff", "curation.pins", "formats", "saving.saver", "writing")


def late_in(modules: set[str]) -> set[str]:
    late = {f"holdfast.registry.{name}" for name in LATE}
    doors = {"holdfast.registry.writing"}
    return {one for one in modules - doors if {one, *map(str, _parents(one))} & late}


def _parents(module: str) -> list[str]:
    words = module.split(".")
    return [".".join(words[:length]) for length in range(1, len(words))]


def test_reading_a_run_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        opened.create_run("run").save({"w": torch.zeros(4), "x": np.zeros(4)}, step=1)
    path = str(tmp_path / "registry")
    loaded = loaded_by(
        "import numpy, torch, holdfast\n"
        f"with holdfast.open({path!r}) as reg: [reg.checkpoint('run')[x][:1] for x in 'wx']\n"
        "ours = [one for name, one in sys.modules.items() if name.startswith('holdfast')]\n"
        "types = {one for of in ours for one in vars(of).values() if isinstance(one, type)}\n"
        "made = [one for one in types if '__dataclass_fields__' in vars(one)]\n"
        f"assert len(made) <= {MOST_DATACLASSES}, made"
    )
    ours = {name for name in loaded if name.partition(".")[0] == "holdfast"}
    assert len(ours) <= MOST_MODULES, sorted(ours)
    before = loaded_by("import numpy, torch")
    assert {name.partition(".")[0] for name in loaded - before} & {
        *HEAVY,
        *NOT_FOR_READING,
    } == set()
    assert late_in(loaded) == set()


@pytest.mark.parametrize("words", ["ls run", "show run/latest", "log run"])
def test_a_command_that_shows_loads_nothing_that_saving_needs(words: str, tmp_path: Path) -> None:
    path = str(tmp_path / "registry")
    with holdfast.init(path, skip_race_probe=True) as opened:
        opened.create_run("run").save({"w": np.zeros(4)}, step=1)
    loaded = loaded_by(
        f"sys.argv = ['holdfast', *{words.split()!r}, '--registry', {path!r}]\n"
        "from holdfast.registry.cli import main\n"
        "try: main()\nexcept SystemExit as error: assert not error.code, error.code"
    )
    ours = {name.removeprefix("holdfast.registry.") for name in loaded}
    assert {"cli.app", "history.log"} <= ours
    assert ours & {*LATE_IN_COMMANDS} == set()
    assert {name.partition(".")[0] for name in loaded} & {"numpy", "pydantic", "tomllib"} == set()


@pytest.mark.parametrize("name", ["backends", "registry"])
def test_a_folder_of_the_checkout_has_no_name_of_its_own(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: import `holdfast`")


def test_the_module_of_errors_offers_all_of_them() -> None:
    errors = importlib.import_module("holdfast.errors")
    tree = importlib.import_module("holdfast.registry.errors")
    assert errors.__all__ == tree.__all__
    assert all(getattr(errors, name) is getattr(tree, name) for name in tree.__all__)


def test_the_module_of_formats_offers_what_it_imports_and_is_light() -> None:
    formats = importlib.import_module("holdfast.formats")
    assert list(formats.__all__) == sorted(formats.__all__)
    lazy = {"annotations", "TYPE_CHECKING", "at_first_use", "andrea", "thalia"}
    bound = {name for name in vars(formats) if not name.startswith("_")} - lazy
    assert bound == set(formats.__all__)
    for name in ("andrea", "thalia"):
        program = f"import holdfast; holdfast.formats.{name}.load"
        assert "torch" not in loaded_by(program)
    loaded = loaded_by("import holdfast.formats")
    assert {name.partition(".")[0] for name in loaded} & {*HEAVY, "numpy"} == set()
