"""The reference names everything that users import, and all of it has a docstring that fits."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.support.pages import ROOT

griffe = pytest.importorskip("griffe")

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMED = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
#: The modules that users import from.
PUBLIC = [
    *("holdfast", "holdfast.dcp", "holdfast.distributed", "holdfast.errors"),
    *("holdfast.engines", "holdfast.filesystem"),
    *("holdfast.formats", "holdfast.formats.andrea", "holdfast.formats.thalia", "holdfast.ipython"),
    *("holdfast.jax", "holdfast.lightning", "holdfast.rng", "holdfast.transformers"),
    "holdfast.wandb",
]
#: Settings that fsspec reads from a class.
OF_OTHERS = {"protocol", "root_marker"}


@cache
def package() -> Any:
    extensions = griffe.load_extensions("unpack_typeddict")
    return griffe.load("holdfast", search_paths=[ROOT / "src"], extensions=extensions)


def test_each_name_is_there_once() -> None:
    assert len(set(NAMED)) == len(NAMED)


def test_the_reference_names_all_that_modules_offer() -> None:
    for module in PUBLIC:
        source = package() if module == "holdfast" else package()[module.removeprefix("holdfast.")]
        if module == "holdfast.errors":  # whose list is another module's
            source = package()["registry.errors"]
        offered = {f"{module}.{name}" for name in source.exports}
        assert offered, module
        # The errors have a page of their own.
        assert offered - {"holdfast.RegistryError"} - set(NAMED) == set()


def test_no_module_is_left_out() -> None:
    """Each module beside `__init__` in src/holdfast is one that users import from."""
    root = ROOT / "src" / "holdfast"
    files = [path.relative_to(root) for path in (*root.glob("*.py"), *root.glob("formats/*.py"))]
    names = {".".join(path.with_suffix("").parts).removesuffix("__init__") for path in files}
    assert {f"holdfast.{name}".rstrip(".") for name in names} == set(PUBLIC)


def _members(name: str) -> Iterator[Any]:
    """Yield what a name is, and the public members of a class."""
    found = package()[name.removeprefix("holdfast.")]
    yield found
    if found.is_class:
        for member in found.all_members.values():
            if not member.name.startswith("_") and member.name not in OF_OTHERS:
                yield member


def _is_function(attribute: Any) -> bool:
    """Return whether an attribute is another name of a method: `mkdir = rmdir = _refuse`."""
    return str(attribute.value) in attribute.parent.all_members


def _explained(thing: Any) -> bool:
    """Return whether a thing, or a class that it belongs to, explains it."""
    if thing.has_docstring or (thing.is_attribute and _is_function(thing)):
        return True
    holders = [thing.parent, *thing.parent.mro()] if thing.parent.is_class else []
    texts = [holder.docstring.value for holder in holders if holder.has_docstring]
    return any(re.search(rf"^ +{thing.name}: ", text, re.M) for text in texts)


def test_everything_has_a_docstring_that_fits_its_signature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    things = [thing for name in NAMED for thing in _members(name)]
    assert [thing.path for thing in things if not _explained(thing)] == []
    with caplog.at_level(logging.WARNING):
        for thing in things:
            if thing.has_docstring:
                thing.docstring.parse("google", warn_missing_types=False)
    assert caplog.messages == []
