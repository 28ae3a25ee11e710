"""A monitored metric that never comes: evictions without a best are told, once for each phase."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Monitor, Retention

LOSS = Monitor(metric="loss", mode="min")
TOLD = r"run: phase main: .* none has a value of loss"


def save(run, steps, **metrics):
    for step in steps:
        run.save({"w": np.full(20, step)}, step=step, metrics=metrics)


@pytest.mark.parametrize("metrics", [{}, {"los": 1.0}, {"loss": float("nan")}])
def test_the_first_eviction_without_a_rated_checkpoint_is_told_once(reg, caplog, metrics) -> None:
    run = reg.create_run("run", monitor=LOSS, retention=Retention(last=2))
    save(run, (1, 2), **metrics)
    assert caplog.records == []
    with pytest.warns(UserWarning, match=TOLD) as warned:
        save(run, (3, 4, 5), **metrics)
    assert len(warned) == len(caplog.records) == 1


def test_a_pruning_by_hand_and_a_journal_tell_it_too(reg, tmp_path: Path) -> None:
    run = reg.create_run("run", monitor=LOSS)
    save(run, (1, 2))
    with pytest.warns(UserWarning, match=TOLD):
        run.retention.prune(Retention(last=1))
    holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    with holdfast.open(tmp_path / "reg", journal=tmp_path / "journal") as journaled:
        other = journaled.create_run("other", monitor=LOSS, retention=Retention(last=1))
        with pytest.warns(UserWarning, match="other: phase main"):
            save(other, (1, 2, 3))
        other.wait(remote=True)


def test_nothing_is_told_where_a_best_is_known_or_none_is_asked_for(reg) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rated = reg.create_run("rated", monitor=LOSS, retention=Retention(last=1))
        save(rated, (1,), loss=1.0)
        save(rated, (2, 3, 4))  # the best stays
        save(reg.create_run("plain", retention=Retention(last=1)), (1, 2, 3))
        keeps = reg.create_run("keeps", monitor=LOSS)
        save(keeps, (1, 2, 3))
    assert len(rated.checkpoints()) == 2
