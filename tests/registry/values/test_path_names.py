"""Names of files that are safe on every system, and those that are not."""

from __future__ import annotations

import pytest

from holdfast.registry.errors import InvalidInput
from holdfast.registry.values.path_names import check_path_name, check_path_names


@pytest.mark.parametrize("name", ["a", "a/b.c", ".hidden", "ä/日本", "a" * 255, "console.txt"])
def test_safe_names(name: str) -> None:
    assert check_path_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "leaves"), ("/a", "absolute"), ("a//b", "leaves"), ("../a", "leaves"),
        ("a/..", "leaves"), ("a/./b", "leaves"), ("a/", "leaves"), ("a\\b", "character"),
        ("a\0", "character"), ("a\n", "character"), ("c:a", "character"), ("a\u202eb", "character"),
        ("NUL", "device"), ("x/com1.txt", "device"), ("Aux .c", "device"), ("a.", "dot"),
        ("a ", "dot"), ("\udcff", "Unicode"), ("a" * 256, "255"), ("a/" * 600 + "a", "1024"),
        (7, "text"), (None, "text"),
    ],
)  # fmt: skip
def test_unsafe_names(name: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        check_path_name(name)


@pytest.mark.parametrize(
    "names",
    [["a", "A"], ["a", "a"], ["\u00e9", "e\u0301"], ["a", "a/b"], ["a/b", "a"], ["a/b", "A/c"]],
)
def test_names_that_are_one_file_somewhere(names: list[str]) -> None:
    with pytest.raises(InvalidInput, match="one file"):
        check_path_names(names)


def test_names_of_one_folder() -> None:
    check_path_names(["a/b", "a/c", "b/a", "ab"])
