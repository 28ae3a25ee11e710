"""Each format reads changed files: they give a state or a typed error. `scripts/fuzz` is longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.registry import formats
from holdfast.registry.formats.table import FORMATS as TABLE
from tests.support import fuzzing

INPUTS = 60


def test_every_format_has_a_target() -> None:
    assert {one.name for one in TABLE} == {
        *fuzzing.FORMATS,
        "opaque",
        "tree",
    }  # the bytes of those two are not parsed


@pytest.mark.parametrize("name", fuzzing.FORMATS)
def test_changed_files(name: str, tmp_path: Path) -> None:
    target = fuzzing.Target(name, tmp_path)
    for root in target.roots:
        assert formats.read(root, format=name, portable=True).state
        assert formats.validate(root, format=name) == []
    for number, (_, file, sound) in enumerate(target.files):
        if file.parent.name == "attacks":
            target.try_one(bytes([number]) + sound)
    target.tried = target.refused = 0
    chance = random.Random(name)
    for _ in range(INPUTS):
        target.try_one(target.mutated(chance))
    assert target.tried == INPUTS
    assert target.refused > INPUTS // 20
