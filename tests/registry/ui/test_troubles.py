"""Damage, NaN, failures and metrics that never came, as the pages show them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Monitor, Retention
from holdfast.registry.store.address import Address
from holdfast.registry.ui.pages.run import show_run
from holdfast.registry.ui.pages.runs import list_runs
from holdfast.registry.ui.rendering import marked, number
from holdfast.registry.ui.source import Source

LOSS = Monitor(metric="loss", mode="min")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    place = tmp_path / "reg"
    with holdfast.init(place, skip_race_probe=True) as reg:
        wild = reg.create_run("wild", monitor=LOSS)
        for step, loss in enumerate([1.0, float("nan"), float("inf"), float("nan")]):
            wild.save({"w": np.full(2000, step)}, step=step, metrics={"loss": loss})
        with pytest.raises(ValueError), reg.create_run("broken") as broken:
            broken.save({"w": np.arange(90_000)}, step=1)
            raise ValueError("no")
        silent = reg.create_run("silent", monitor=LOSS, retention=Retention(last=1))
        silent.save({"w": np.zeros(20)}, step=1)
        with pytest.warns(UserWarning, match="as if none were better"):
            silent.save({"w": np.ones(20)}, step=2)
        silent.status = "interrupted"
    pack = max(place.rglob("packs/*/*.0"), key=lambda one: one.stat().st_size)
    pack.write_bytes(b"x" + pack.read_bytes()[1:])
    with holdfast.open(place) as reg:
        reg.verify(deep=True)
        reg.verify()
    found = Source.open(Address(place))
    yield found
    found.close()


def test_rows_say_what_is_wrong(source: Source) -> None:
    rows = {row.name: row for row in list_runs(source).rows}
    assert rows["wild"].problems == ("loss is nan",)
    assert np.isnan(rows["wild"].latest)
    assert rows["broken"].problems == ("damaged",)
    assert rows["silent"].problems[0].startswith("no best: none has a value of loss, and 1 ")


def test_a_run_shows_values_marks_and_the_reason(source: Source) -> None:
    wild, broken = show_run(source, "wild"), show_run(source, "broken")
    assert [str(one.value) for one in wild.checkpoints] == ["nan", "inf", "nan", "1.0"]
    assert wild.charts[0].nonfinite == 3
    assert broken.row.reason.startswith("ValueError: no\n")
    assert "damaged" in broken.checkpoints[0].marks


def test_what_is_not_finite_is_marked() -> None:
    assert number(float("-inf")) == '<span class="nonfinite">-inf</span>'
    assert marked("nan") == '<span class="nonfinite">nan</span>'
    assert (marked("nano"), number(1.5), number(2)) == ("nano", "1.5", "2")
