"""What decides `best`: metrics and sums of metrics, and what can never win."""

from __future__ import annotations

import math

import pytest

from holdfast import Monitor
from holdfast.registry.errors import InvalidInput

INF = math.inf
SKILL = Monitor(metric="mu - 3*sigma", mode="max")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("mu", 25.0),
        ("mu - 3*sigma", 19.0),
        ("mu  -  3 * sigma", 19.0),
        ("mu + sigma", 27.0),
        ("2.5*sigma", 5.0),
        ("0.5 * mu + 2*sigma - mu", -8.5),
        ("val-loss", 0.25),
        ("val-loss + eval/top-1", 0.75),
        ("mu-sigma", -7.0),  # without spaces it is a name
        ("a metric of words", 1.0),
    ],
)
def test_a_sum_is_of_metrics_with_factors(expression, value):
    metrics = {
        "mu": 25.0,
        "sigma": 2.0,
        "val-loss": 0.25,
        "eval/top-1": 0.5,
        "mu-sigma": -7.0,
        "a metric of words": 1.0,
    }
    assert Monitor(metric=expression, mode="max").value(metrics) == value


def test_a_metric_of_that_very_name_goes_before_the_sum():
    assert SKILL.value({"mu": 25.0, "sigma": 2.0, "mu - 3*sigma": 7.0}) == 7.0
    assert SKILL.value({"mu - 3*sigma": 7.0}) == 7.0


@pytest.mark.parametrize("metrics", [{}, {"mu": 25.0}, {"sigma": 2.0}, {"other": 1.0}])
def test_what_is_missing_has_no_value(metrics):
    assert SKILL.value(metrics) is None
    assert math.isnan(SKILL.rank(metrics))


@pytest.mark.parametrize(
    ("mu", "sigma", "value"),
    [
        (math.nan, 1.0, None),
        (1.0, math.nan, None),
        (INF, INF, None),  # infinity less infinity is no number
        (INF, 1.0, INF),
        (1.0, INF, -INF),
        (-INF, INF, -INF),
    ],
)
def test_infinities_count_and_nan_does_not(mu, sigma, value):
    assert SKILL.value({"mu": mu, "sigma": sigma}) == value


@pytest.mark.parametrize(("mode", "better", "worse"), [("min", -INF, INF), ("max", INF, -INF)])
def test_a_better_value_has_the_lower_rank(mode, better, worse):
    monitor = Monitor(metric="m", mode=mode)
    ranks = [monitor.rank({"m": value}) for value in (better, 0.0, worse)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 3


def test_it_says_what_it_needs():
    assert SKILL.needs == ("mu", "sigma")
    assert Monitor(metric="val-loss", mode="min").needs == ("val-loss",)
    assert Monitor(metric="a metric of words", mode="min").needs == ("a metric of words",)


def test_it_is_called_by_its_name_or_its_metric():
    assert SKILL.label == "mu - 3*sigma"
    assert Monitor(metric="mu - 3*sigma", mode="max", name="skill").label == "skill"


@pytest.mark.parametrize(
    "fields",
    [
        {"metric": "loss", "mode": "lowest"},
        {"metric": 5, "mode": "min"},
    ],
)
def test_what_is_no_monitor_is_refused(fields):
    with pytest.raises(InvalidInput, match="not a monitor; expected metric: a name or a sum"):
        Monitor(**fields)


@pytest.mark.parametrize("fields", [{"metric": "loss"}, {"metric": "a", "mode": "min", "more": 1}])
def test_a_monitor_has_its_fields_and_no_other(fields):
    with pytest.raises(TypeError, match=r"'mode'|'more'"):
        Monitor(**fields)
