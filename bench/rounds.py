"""Running contenders in interleaved rounds, and the ratios between them.

A machine's speed wanders from minute to minute, so no two figures of different minutes are
compared: each round runs every contender once, in a new random order, and ratios are taken round
by round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

#: Seconds of each round, by contender.
Seconds = dict[str, list[float]]


def nothing() -> None:
    """Prepare or tidy up nothing."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to time.

    Attributes:
        name: What tables call it.
        act: What is timed.
        before: Preparation, not timed.
        after: Tidying up, not timed.
    """

    name: str
    act: Callable[[], Any]
    before: Callable[[], Any] = nothing
    after: Callable[[], Any] = nothing


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of interest.

    Attributes:
        of: The contender.
        to: Its yardsticks; of several, the slowest of the round.
        goal: The highest ratio that is good enough, or None.
    """

    of: str
    to: tuple[str, ...]
    goal: float | None = None

    @property
    def label(self) -> str:
        yardstick = self.to[0] if len(self.to) == 1 else f"slower of {' and '.join(self.to)}"
        return f"{self.of} / {yardstick}"

    def ratio(self, seconds: Seconds, of_rounds: Callable[[list[float]], float]) -> float:
        """Return the ratio of one figure for all rounds, such as the median."""
        return of_rounds(seconds[self.of]) / max(of_rounds(seconds[name]) for name in self.to)

    def ratios(self, times: Seconds) -> list[float]:
        """Return the ratio of every round."""
        rows = zip(times[self.of], *(times[name] for name in self.to), strict=True)
        return [own / max(yardsticks) for own, *yardsticks in rows]


@dataclass(slots=True)
class Report:
    """What the rounds of one workload gave.

    Attributes:
        workload: Its name.
        size_bytes: Size of its state.
        times: Seconds on the clock by contender and round.
        cpu: Seconds of all the process's threads, likewise; other jobs disturb them less.
        ratios: By the label of the comparison, round by round.
        extra: Other figures, by name.
    """

    workload: str
    size_bytes: int
    times: Seconds
    cpu: Seconds
    ratios: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def run_rounds(
    contenders: Sequence[Contender], count: int, seed: int = 0
) -> tuple[Seconds, Seconds]:
    """Run all contenders once to warm up, then `count` times, each round in another order.

    Returns:
        Seconds on the clock, and seconds of the processor.
    """
    order = random.Random(seed)
    times: Seconds = {contender.name: [] for contender in contenders}
    cpu: Seconds = {contender.name: [] for contender in contenders}
    for number in range(count + 1):
        for contender in order.sample(contenders, len(contenders)):
            on_clock, on_cpu = _timed(contender)
            if number:
                times[contender.name].append(on_clock)
                cpu[contender.name].append(on_cpu)
    return times, cpu


def print_times(report: Report, console: Console) -> None:
    """Print medians and minima of the seconds, fastest first."""
    table = Table(title=f"{report.workload}, {report.size_bytes / 1e6:.0f} MB: seconds")
    table.add_column("contender")
    for column in ("median", "least", "CPU, median", "GB/s at median"):
        table.add_column(column, justify="right")
    for name, seconds in sorted(report.times.items(), key=lambda item: median(item[1])):
        middle = median(seconds)
        rate = report.size_bytes / middle / 1e9
        cpu = f"{median(report.cpu[name]):.3f}"
        table.add_row(name, f"{middle:.3f}", f"{min(seconds):.3f}", cpu, f"{rate:.2f}")
    console.print(table)


def print_ratios(report: Report, comparisons: Sequence[Comparison], console: Console) -> None:
    """Print each ratio round by round, its median, and the ratios of least times and of CPU."""
    table = Table(title=f"{report.workload}: ratios")
    table.add_column("ratio", no_wrap=True)
    for column in ("median", "of minima", "of CPU", "goal", "round by round"):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        ratios = comparison.ratios(report.times)
        table.add_row(
            comparison.label,
            f"{median(ratios):.2f}",
            f"{comparison.ratio(report.times, min):.2f}",
            f"{comparison.ratio(report.cpu, median):.2f}",
            "" if comparison.goal is None else f"{comparison.goal:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    console.print(table)


def _timed(contender: Contender) -> tuple[float, float]:
    contender.before()
    gc.collect()
    try:
        cpu, start = time.process_time(), time.perf_counter()
        contender.act()
        return time.perf_counter() - start, time.process_time() - cpu
    finally:
        contender.after()
