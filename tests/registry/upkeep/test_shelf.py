"""Values in a temporary database: what is told if it fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.registry.errors import StorageError, StoreFull
from holdfast.registry.upkeep.shelf import Shelf


@pytest.mark.parametrize(
    "use",
    [
        list,
        len,
        lambda shelf: shelf.get("a"),
        lambda shelf: "a" in shelf,
        lambda shelf: shelf.take([("b", 2)]),
    ],
    ids=["iter", "len", "get", "contains", "take"],
)
def test_a_database_that_fails_is_no_full_store(use: Callable[[Shelf[int]], object]) -> None:
    shelf = Shelf[int]()
    shelf["a"] = 1
    assert (list(shelf), shelf.get("a")) == (["a"], 1)
    shelf._db.close()
    with pytest.raises(StorageError, match=r"a temporary file .* TMPDIR") as told:
        use(shelf)
    assert not isinstance(told.value, StoreFull)
