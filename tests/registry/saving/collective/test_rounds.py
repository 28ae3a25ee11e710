"""Chunks are hashed round by round, which is not their order in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Registry
from holdfast.distributed import Group
from tests.registry.saving.collective.ranks import group_of, together
from tests.registry.saving.collective.rows import WHOLE, Rows

pytestmark = pytest.mark.usefixtures("rows_are_sharded")


def test_tensors_of_which_nothing_travels_keep_their_place(reg: Registry) -> None:
    """Tensors that every rank has come after sharded ones, whose pieces take several rounds."""
    whole: dict[str, Any] = {f"t{n}": WHOLE[:500] + n for n in range(6)}
    same = {f"same{n}": WHOLE[:700] - n for n in range(4)}
    alone = reg.create_run("alone").save({"model": {**whole, **same}}, step=1)

    def save(group: Group) -> Any:
        parts = {name: Rows(one, group.rank, 2) for name, one in whole.items()}
        run = reg.run("run", group=group)
        return run.save({"model": {**parts, **same}}, step=1).digest

    assert together(group_of(2, 30.0), save) == [alone.digest] * 2
    assert not reg.verify(deep=True).findings
