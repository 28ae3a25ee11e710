"""Keys of configurations ranked by how strongly they go with a metric, against plain formulas."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest

from holdfast import Monitor, Registry
from holdfast.registry.comparing import KeyRank
from holdfast.registry.errors import InvalidInput

LOSS = Monitor(metric="loss", mode="min")


def sweep(reg: Registry, configs: list[dict[str, object]], losses: list[float]) -> None:
    for n, (config, loss) in enumerate(zip(configs, losses, strict=True)):
        run = reg.create_run(f"s{n:02d}", config=config, monitor=LOSS)
        run.save({"w": np.zeros(2)}, step=1, metrics={"loss": loss})


def ranks(values: list[float]) -> list[float]:
    """Return ranks; equal values have the mean of theirs."""
    order = sorted(values)
    return [fmean(at + 1 for at, other in enumerate(order) if other == one) for one in values]


def spearman(some: list[float], others: list[float]) -> float:
    pairs = list(zip(ranks(some), ranks(others), strict=True))
    middle = fmean(one for one, _ in pairs)
    spread = [sum((pair[side] - middle) ** 2 for pair in pairs) for side in (0, 1)]
    return sum((one - middle) * (other - middle) for one, other in pairs) / (
        (spread[0] * spread[1]) ** 0.5
    )


def eta_squared(groups: list[object], values: list[float]) -> float:
    """Return the share of the variance of ranks between groups, adjusted for their number."""
    found = ranks(values)
    middle, within = fmean(found), 0.0
    for group in set(groups):
        own = [one for one, of in zip(found, groups, strict=True) if of == group]
        within += sum((one - fmean(own)) ** 2 for one in own)
    total = sum((one - middle) ** 2 for one in found)
    return 1 - (within / (len(found) - len(set(groups)))) / (total / (len(found) - 1))


def test_numbers_and_texts_have_the_figures_of_the_formulas(reg: Registry) -> None:
    rng = random.Random(4)
    names = [rng.choice(["adam", "lion", "sgd"]) for _ in range(20)]
    widths = [rng.choice([64, 64, 128, 256]) for _ in range(20)]
    losses = [
        round(w / 150 + (n == "sgd") / 4 + rng.random() / 4, 2)
        for w, n in zip(widths, names, strict=True)
    ]
    configs: list[dict[str, object]] = [
        {"opt": {"name": name}, "width": width, "heads": [width], "data": "same", "seed": seed}
        for seed, (name, width) in enumerate(zip(names, widths, strict=True))
    ]
    sweep(reg, configs, losses)
    found = reg.rank_config(LOSS)
    assert (found.monitor, found.runs, found.unranked) == (LOSS, 20, {})
    keys = {one.key: one for one in found.keys}
    assert set(keys) == {"opt.name", "width", "seed"}  # `data` does not vary
    assert [one.strength for one in found.keys] == sorted(
        (one.strength for one in found.keys), reverse=True
    )
    width = keys["width"]
    rho = spearman([float(one) for one in widths], losses)
    assert width.correlation == pytest.approx(rho)
    adjusted = 1 - (1 - rho**2) * 19 / 18
    assert width.strength == pytest.approx(max(adjusted, eta_squared([*widths], losses)))
    assert width.confounded == ("heads",)
    means = {
        one: fmean(loss for loss, of in zip(losses, widths, strict=True) if of == one)
        for one in widths
    }
    best = min(means, key=lambda one: means[one])
    assert (width.best, width.best_runs) == (str(best), widths.count(best))
    assert width.best_mean == pytest.approx(means[best])
    name = keys["opt.name"]
    assert name.correlation is None
    assert name.strength == pytest.approx(max(0, eta_squared([*names], losses)))
    assert width.chance < 0.02 < 0.2 < keys["seed"].chance


def test_the_best_in_the_middle_is_strong_without_a_correlation(reg: Registry) -> None:
    configs: list[dict[str, object]] = [
        {"lr": 10.0**-n, "decay": 1e4 * 10.0**n if n < 24 else None, "debug": n % 2 == 0}
        for n in range(25)
    ]
    sweep(reg, configs, [abs(n - 12) + n / 100 for n in range(25)])
    found = reg.rank_config()
    lr, decay, debug = found.keys
    assert [one.is_hump for one in found.keys] == [True, True, False]
    assert "Best at middle values, so the correlation is near 0: lr, decay." in found.about
    assert (lr.key, decay.key, debug.key) == ("lr", "decay", "debug")  # absent in one run: apart
    assert lr.correlation is not None
    assert abs(lr.correlation) < 0.1
    assert lr.strength > 0.5
    assert lr.chance < 0.01
    assert lr.best_runs == 7
    assert float(lr.best.split(" to ")[0]) <= 1e-12 <= float(lr.best.split(" to ")[1])
    assert (decay.runs, debug.runs) == (24, 25)
    assert (debug.strength < 0.01, debug.chance > 0.5) == (True, True)


def test_a_run_counts_with_its_own_best(reg: Registry) -> None:
    sweep(reg, [{"lr": n} for n in range(6)], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    fork = reg.fork("s00/latest", "fork", config={"lr": 99})
    assert reg.rank_config().runs == 6  # what it inherited came of another configuration
    fork.restore()
    for step, loss in ((2, 9.0), (3, 7.0), (4, float("nan"))):
        fork.save({"w": np.full(2, step)}, step=step, metrics={"loss": loss})
    (found,) = reg.rank_config().keys
    assert (found.runs, found.correlation) == (7, pytest.approx(1.0))
    ranking = reg.rank_config()
    assert ranking.unlike == ("fork",)
    assert "7 runs, each with its best loss (min). 1 of them is a fork or" in ranking.about[0]
    high = Monitor(metric="loss", mode="max")
    (best,) = reg.rank_config(high, runs=["fork", *reg.run_names()]).keys
    assert isinstance(best, KeyRank)
    assert (best.runs, best.best) == (7, "3 to 99")
    assert best.best_mean == pytest.approx((4 + 5 + 6 + 9) / 4)
    other = reg.create_run("merge", monitor=LOSS, config={"of": 2})
    other.save({"w": np.zeros(2)}, step=1, metrics={"loss": 0.5})
    assert reg.rank_config().unlike == ("fork", "merge")
    assert reg.rank_config(runs=[name for name in reg.run_names() if "s" in name]).unlike == ()


def test_too_few_runs_and_no_monitor_are_refused(reg: Registry) -> None:
    with pytest.raises(InvalidInput, match="no run has a monitor"):
        reg.rank_config()
    sweep(reg, [{"lr": n} for n in range(6)], [1.0, 2.0, 3.0, 4.0, 5.0, float("inf")])
    with pytest.raises(InvalidInput, match=r"too few runs .* at least 6 .* found 5"):
        reg.rank_config()
