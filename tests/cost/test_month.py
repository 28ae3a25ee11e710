"""A month of a team loses nothing, and needs what scripts/cost.py predicts."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cost.month import PACKS, STATE_BYTES, Plan, Team

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/cost.py"""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.delitem(sys.modules, "cost", raising=False)
    return importlib.import_module("cost")


def check_month(plan: Plan, cost: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a team live for a month, and compare it with the prediction."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    team = Team(plan)
    team.live(monkeypatch)
    assert team.bill["deaths"] * team.bill["errors"] * team.bill["collected"] > 0, team.bill
    kept = team.check_nothing_lost()
    monkeypatch.setattr(cost, "NIGHTS", plan.nights)
    work = cost.Work(
        name="a team",
        training=plan.writers,
        days=plan.days,
        saves=plan.saves_a_day,
        size_bytes=STATE_BYTES,
        packs=PACKS,
        kept=kept / len(team.saved),
        mirrors=1,
        collectors=2,
    )
    said = cost.predict(work)
    needed = cost.Month(team.asked["put"], team.asked["get"], team.byte_months)
    prices = cost.Prices()
    ratios = {
        "packs": team.stored_bytes("packs/") / (2 * kept * STATE_BYTES),
        "bytes": team.stored_bytes() / said.kept_bytes,
        "PUT, LIST": needed.puts / said.puts,
        "GET, HEAD": needed.gets / said.gets,
        "cost": needed.cost(prices) / said.cost(prices),
    }
    print(f"{len(team.saved)} runs, {dict(team.bill)}, {kept} kept, {needed}, {ratios}")
    for name, ratio in ratios.items():
        within = 0.05 if name in ("packs", "bytes") else 0.2
        assert 1 - within <= ratio <= 1 + within, ratios


def test_a_few_nights_lose_nothing_and_need_what_is_predicted(
    cost: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(writers=4, runs=12, nights=3, failing=0.2)
    check_month(plan, cost, monkeypatch, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_month_loses_nothing_and_needs_what_is_predicted(
    cost: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_month(Plan(), cost, monkeypatch, tmp_path)


def test_the_page_has_the_table_and_other_prices_another_one() -> None:
    def printed(*words: str) -> str:
        command = [sys.executable, ROOT / "scripts" / "cost.py", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"```text\n{printed()}```" in page
    (dear,) = re.findall(r"a team of 50 .* ([\d.]+)\n", printed("--storage", "46"))
    (cheap,) = re.findall(r"a team of 50 .* ([\d.]+)\n", printed())
    assert 1.5 < float(dear) / float(cheap) < 2
    words = "--training 50 --days 2.5 --saves 8 --gb 1.44 --packs 24 --kept 4 --mirrors 1"
    assert re.findall(r"yours .* ([\d.]+)\n", printed(*words.split())) == [cheap]


def test_the_requests_of_an_operation_are_those_of_the_page_of_stores(cost: Any) -> None:
    page = (ROOT / "docs" / "stores.md").read_text()
    counted = {
        name: int(count) for name, count in re.findall(r"^\| (.+) \| \d+ \| (\d+) \|$", page, re.M)
    }
    assert sum(cost.saving(2)) == counted["save a small state, each later time"]
    assert sum(cost.saving(8)) == counted["save a large state of 8 packs, each later time"]
    assert sum(cost.saving_first(2)) == counted["save a small state, the first save of a new run"]
    assert sum(cost.CREATE) == counted["create a run"]
    assert sum(cost.COMMIT) == counted["commit without objects: a tag, a metric"]
    assert sum(cost.OPEN_REGISTRY) == counted["open a registry"]
    # There the newest snapshot is five slots back; a run that nobody trains has one mark more.
    assert sum(cost.OPEN_RUN) == counted["open a run, or `holdfast ls RUN`"] + 1


def test_the_months_of_the_page_about_deciding_add_up(cost: Any) -> None:
    page = (ROOT / "docs" / "deciding.md").read_text()
    rows = re.findall(r"\| ([\d,]+) GB \| ([\d,]+) \| ([\d.]+) dollars \|$", page, re.M)
    assert len(rows) == 4
    for size, writes, said in rows:
        month = cost.Month(
            puts=int(writes.replace(",", "")), byte_months=1e9 * int(size.replace(",", ""))
        )
        assert f"{month.cost(cost.Prices()):.{len(said.partition('.')[2])}f}" == said
