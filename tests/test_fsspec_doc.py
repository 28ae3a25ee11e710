"""Every snippet of docs/fsspec.md runs, in order, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest

from holdfast.filesystem import HoldfastFileSystem
from tests.support.pages import BLOCK

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "fsspec.md"


def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pandas", "xarray"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("holdfast", HoldfastFileSystem, clobber=True)
    HoldfastFileSystem.clear_instance_cache()
    names: dict[str, Any] = {}
    printed, compared = "", 0
    for found in BLOCK.finditer(PAGE.read_text()):
        if found[2] == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(found[3], str(PAGE), "exec"), names)
            printed = out.getvalue()
        else:
            assert found[2] == "text"
            assert printed == found[3]
            compared += 1
    assert compared == 3
    names["reg"].close()
    HoldfastFileSystem.clear_instance_cache()


def test_fsspec_finds_the_class_by_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["holdfast"].partition(":")
    assert getattr(import_module(module), name) is HoldfastFileSystem
