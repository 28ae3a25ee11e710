"""Every test has its turn in the check, and none of its groups is ever left out."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tests.support.turns import MANY, ONE_IN, SLOW, waiting

_ROOT = Path(__file__).parents[1]


def _item(nodeid: str, is_soak: bool = False) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: is_soak or None)


def test_each_has_one_turn_and_each_group_has_one_of_it_every_time() -> None:
    items = [_item("tests/a/test_quick.py::test_quick")]
    items += [_item(f"tests/a/test_many.py::test_many[{n}]") for n in range(MANY)]
    items += [_item(f"tests/a/test_many.py::test_few[{n}]") for n in range(MANY - 1)]
    slow = [f"tests/b/test_{n}.py::test_slow" for n in range(5)]
    items += [_item(f"{name}[{case}]") for name in slow for case in (1, 2)]
    alone = "tests/c/test_alone.py::test_alone"
    long = _item("tests/b/test_9.py::test_slow", is_soak=True)
    items += [_item(alone), long]
    turns: Counter[str] = Counter()
    for turn in range(ONE_IN):
        waits = {id(item) for item in waiting(items, [*slow, alone, long.nodeid], turn)}
        tried = {item.nodeid for item in items if id(item) not in waits}
        turns.update(tried)
        assert any("test_many[" in name for name in tried)
        assert any(name.startswith("tests/b/") and "9" not in name for name in tried)
        assert sum(name.startswith("tests/b/") for name in tried) in (3, 5)  # of 10, and one long
    always = {
        item.nodeid
        for item in items
        if not item.nodeid.startswith((*slow, "tests/a/test_many.py::test_many"))
    }
    assert turns == {item.nodeid: ONE_IN if item.nodeid in always else 1 for item in items}


def test_the_slow_ones_are_tests() -> None:
    slow = SLOW.read_text().split()
    assert len(slow) > 200
    for name in slow:
        file, first, *_ = name.split("::")  # a method of a contract is in a class above its own
        assert re.search(rf"^(def|class) {first}\b", _text(_ROOT / file), re.M), name


@cache
def _text(path: Path) -> str:
    return path.read_text()
