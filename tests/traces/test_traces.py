"""What programs did to their stores is what the model of the protocol allows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast.backends import Backend, open_backend
from holdfast.registry.errors import IntegrityError
from holdfast.registry.face.factory import open_on
from tests.schedules.broken import deletes_before_all_marks, no_mark, no_second_look
from tests.support.stores import new_backend
from tests.traces.__main__ import check, record
from tests.traces.acceptor import Acceptor
from tests.traces.lives import live
from tests.traces.reading import Call, read

#: A trace that the model allows, and its store.
Sound = tuple[list[Call], Backend]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder, backend = tmp_path_factory.mktemp("trace"), new_backend()
    live(lambda: backend, folder, turns=12)
    return read(folder), backend


def test_writers_and_a_collector_do_what_the_model_allows(sound: Sound) -> None:
    calls, backend = sound
    with open_on(backend) as reg:
        acceptor = Acceptor(calls, reg.handle.store)
        acceptor.check()
    assert len({call.client for call in calls}) > 3
    for kind, least in {"slot": 20, "epoch": 2, "delete": 5, "listing": 20, "read": 3}.items():
        assert acceptor.counts[kind] >= least, acceptor.counts


#: A change to a trace, and what the acceptor says of it.
Forged = Callable[[list[Call]], list[Call]]


def _an_early_delete(calls: list[Call]) -> list[Call]:
    """An object goes right after it was put."""
    put = next(one for one in calls if one.has_put and one.key.startswith("packs/"))
    gone = replace(put, method="delete", begin=put.end + 1, end=put.end + 2, digest=None)
    return sorted([*calls, gone], key=lambda call: call.begin)


def _a_blind_read(calls: list[Call]) -> list[Call]:
    """A slot is not found that was acknowledged before."""
    put = next(one for one in calls if one.has_put and "/log/" in one.key)
    read_ = replace(put, method="get", answer="absent", begin=put.end + 1, end=put.end + 2)
    return [*calls, read_]


def _a_short_listing(calls: list[Call]) -> list[Call]:
    """A listing lacks its newest slot."""
    at = max(n for n, one in enumerate(calls) if one.method == "list" and "/log/" in one.key)
    return [*calls[:at], replace(calls[at], answer=[]), *calls[at + 1 :]]


def _two_creators(calls: list[Call]) -> list[Call]:
    """A slot is created twice."""
    put = next(one for one in calls if one.has_put and "/log/" in one.key)
    return [*calls, replace(put, client="another")]


def _a_lost_put(calls: list[Call]) -> list[Call]:
    """An object that a run needs was never put."""
    needed = next(one for one in calls if one.has_put and one.key.startswith("placements/"))
    return [
        replace(one, begin=2**62, end=2**62) if one.key == needed.key and one.may_have_put else one
        for one in calls
    ]


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_an_early_delete, "which no sweep has freed"),
        (_a_blind_read, "was not found"),
        (_a_short_listing, "was not listed"),
        (_two_creators, "was created 2 times"),
        (_a_lost_put, "which is not there"),
    ],
)
def test_a_forged_trace_is_refused(forge: Forged, said: str, sound: Sound) -> None:
    calls, backend = sound
    with open_on(backend) as reg, pytest.raises(AssertionError, match=said):
        Acceptor(forge(calls), reg.handle.store).check()


@pytest.mark.parametrize(
    "broken",
    [
        no_second_look,
        *(pytest.param(one, marks=pytest.mark.soak) for one in (no_mark, deletes_before_all_marks)),
    ],
)
def test_a_collector_that_breaks_a_rule_is_refused(
    broken: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for attempt in range(10):
        folder, backend = tmp_path / str(attempt), new_backend()
        with suppress(AssertionError, IntegrityError):
            # What is lost, `verify` or the next collection may have found too.
            live(lambda backend=backend: backend, folder, turns=12)
        with open_on(backend) as reg:
            acceptor = Acceptor(read(folder), reg.handle.store)
        with suppress(AssertionError):
            acceptor.check()
        if acceptor.violations:
            break
    assert any("deletes" in one for one in acceptor.violations)


@pytest.mark.soak
@pytest.mark.parametrize("server", ["s3_url", "azure_url", "radosgw_url"])
def test_a_real_store_does_what_the_model_takes_for_granted(
    server: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    made = request.getfixturevalue(server)
    url = made() if callable(made) else made
    holdfast.init(url, skip_race_probe=True).close()
    live(lambda: open_backend(url), tmp_path / "trace", turns=20, writers=4, collectors=2)
    calls = read(tmp_path / "trace")
    with holdfast.open(url) as reg:
        acceptor = Acceptor(calls, reg.handle.store)
        acceptor.check()
    record_property("steps", dict(acceptor.counts))
    print(f"{server}: {len(calls)} calls: {dict(acceptor.counts)}")
    assert acceptor.counts["slot"] > 40


PROGRAM = """
import sys
import numpy as np
import holdfast

with holdfast.init(sys.argv[1]) as reg, reg.create_run("mine", seed=1) as run:
    for step in (1, 2):
        run.save({"w": np.full(9_000, step)}, step=step)
    run.retention.evict(run.checkpoints()[0], "an example")
    reg.gc(grace_s=0)
"""


def test_a_program_of_a_user_is_recorded_and_checked(tmp_path: Path) -> None:
    program, trace, url = tmp_path / "mine.py", tmp_path / "trace", str(tmp_path / "registry")
    program.write_text(PROGRAM)
    record(trace, str(program), [url])
    assert any(call.method == "delete" for call in read(trace))
    assert check(trace, url) == 0
