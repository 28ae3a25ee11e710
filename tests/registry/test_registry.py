"""Making and opening registries, and the runs in them."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest

import holdfast
from holdfast import Monitor
from holdfast.backends.errors import InvalidLocation, ReadOnlyStore
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Conflict, Damaged, InvalidInput, NotFound, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.store import RegistryConfig, create_config, read_config
from tests.support.faults import Forgetful, Hooked, Once
from tests.support.states import same, small_state
from tests.support.stores import contents, new_backend


def test_a_registry_is_made_and_opened(tmp_path):
    with holdfast.init(tmp_path / "reg") as made:
        assert re.fullmatch(r"[0-9a-f]{32}", made.id)
        assert made.run_names() == []
    with holdfast.open(tmp_path / "reg") as opened:
        assert opened.id == made.id
        assert opened.url == made.url
        assert str(tmp_path) in repr(opened)


def test_what_a_registry_kept_goes_with_it():
    """A program may open thousands of registries, one after another."""
    with open_on(new_backend()) as opened, opened.create_run("run") as run:
        run.save(small_state(), step=1)
        run.restore()
        opened.gc(dry_run=True)
    kept = weakref.ref(opened.handle.store)
    del opened, run
    gc.collect()
    assert kept() is None


def test_a_second_registry_in_the_same_place_is_refused(tmp_path):
    with holdfast.init(tmp_path / "reg") as made:
        with pytest.raises(Conflict, match=r"a registry exists here already.*Open it"):
            holdfast.init(tmp_path / "reg")
        assert read_config(made.handle.store.backend).id == made.id


def test_init_records_whether_the_store_was_raced():
    with holdfast.init("memory://raced") as raced:
        assert raced.handle.store.config.race_probe == "passed"
    with holdfast.init("memory://not-raced", skip_race_probe=True) as skipped:
        assert skipped.handle.store.config.race_probe == "skipped"


def test_the_race_leaves_nothing_behind():
    with holdfast.init("memory://clean") as made:
        assert list(contents(made.handle.store.backend)) == ["registry.json"]


def test_a_lost_answer_to_the_config_is_our_registry():
    backend = MemoryBackend()
    config = create_config(Forgetful(backend), "skipped")
    assert read_config(backend) == config


def test_of_many_makers_one_wins():
    backend, outcomes = MemoryBackend(), []

    def make():
        try:
            outcomes.append(create_config(backend, "skipped"))
        except Conflict as error:
            outcomes.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome for outcome in outcomes if isinstance(outcome, RegistryConfig)]
    assert won == [read_config(backend)]
    assert len(outcomes) == 8


def test_another_registry_than_the_remembered_one_is_refused(tmp_path):
    with holdfast.init(tmp_path / "reg") as made:
        holdfast.open(tmp_path / "reg", expect_id=made.id).close()
        with pytest.raises(
            Conflict, match=rf"another registry.*expected {'0' * 32}; found {made.id}"
        ):
            holdfast.open(tmp_path / "reg", expect_id="0" * 32)


def test_read_only_refuses_every_write(tmp_path):
    with holdfast.init(tmp_path / "reg") as made:
        made.create_run("run").save(small_state(), step=1)
    with holdfast.open(tmp_path / "reg", read_only=True) as reader:
        before = contents(reader.handle.store.backend)
        run = reader.run("run")
        assert same(run.latest().load(), small_state())
        for write in (
            lambda: run.save(small_state(1), step=2),
            lambda: run.pins.tags.set("t", run.latest()),
            lambda: run.latest().report({"a": 1}),
            lambda: reader.create_run("more"),
            lambda: reader.run("more", create=True),
        ):
            with pytest.raises(ReadOnlyStore, match="opened for reading"):
                write()
        assert contents(reader.handle.store.backend) == before
        assert reader.verify(deep=True).ok


# Runs


def test_a_run_keeps_what_it_was_begun_with(reg):
    run = reg.create_run(
        "r",
        config={"a": 1},
        seed=2**64 - 1,
        monitor=Monitor(metric="m", mode="max"),
        input_hash="h",
    )
    created = reg.run("r").manifest.created
    assert created == run.manifest.created
    assert (created.seed, created.input_hash) == ("f" * 16, "h")
    assert created.monitors == (Monitor(metric="m", mode="max"),)
    assert created.environment["python"]


def test_a_run_of_the_same_name_is_refused(reg, backend):
    reg.create_run("r")
    before = contents(backend)
    with pytest.raises(Conflict, match=r"r: a run of this name exists.*reg.run\(id\)"):
        reg.create_run("r")
    assert contents(backend) == before


def test_a_default_name_is_time_and_seed_with_a_suffix_on_collision(reg, monkeypatch):
    from datetime import UTC, datetime

    from holdfast.registry.history import creating as creation

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    monkeypatch.setattr(creation, "datetime", Clock)
    names = [reg.create_run(seed=0xFFA1B2C3D4).id for _ in range(3)]
    base = "20260102_030405_a1b2c3d4"
    assert names == [base, f"{base}_2", f"{base}_3"]


def test_without_a_seed_a_random_one_is_kept(reg):
    seeds = {reg.create_run(f"r{i}").manifest.created.seed for i in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_what_is_no_seed_is_refused(reg, backend, seed):
    before = contents(backend)
    with pytest.raises(InvalidInput, match="not a seed"):
        reg.create_run("r", seed=seed)
    assert contents(backend) == before


def test_run_with_create_begins_and_then_continues(reg, backend, open_registry):
    first = reg.run("r", create=True, config={"a": 1})
    first.save(small_state(), step=1)
    again = open_registry(backend).run("r", create=True, config={"a": 2})
    assert again.latest().step == 1
    assert again.config == {"a": 1}
    assert len(list(again.history.commits())) == 2


def test_run_with_create_and_a_rival_continues_the_rivals(backend, open_registry):
    hooked = Hooked(backend)
    rival = open_registry(backend)
    hooked.before = Once("runs/r/log/", lambda: rival.create_run("r", config="rival"), "put_if_abs")
    assert open_registry(hooked).run("r", create=True, config="mine").config == "rival"


def test_the_environment_names_the_run(reg, monkeypatch):
    reg.create_run("from-env")
    monkeypatch.setenv("HOLDFAST_RUN", "from-env")
    assert reg.run().id == "from-env"
    monkeypatch.delenv("HOLDFAST_RUN")
    with pytest.raises(InvalidInput, match=r"no run is named.*HOLDFAST_RUN"):
        reg.run()


@pytest.mark.parametrize("ask", [lambda reg: reg.run(""), lambda reg: reg.checkpoint("/latest")])
def test_an_empty_name_is_not_the_environments(reg, monkeypatch, ask):
    reg.create_run("from-env").save(small_state(), step=1)
    monkeypatch.setenv("HOLDFAST_RUN", "from-env")
    with pytest.raises(InvalidInput):
        ask(reg)


def test_runs_are_listed(reg):
    for name in ("b", "a", "c"):
        reg.create_run(name)
    assert reg.run_names() == ["a", "b", "c"]


def test_opening_a_run_that_is_not_there_writes_nothing(reg, backend):
    before = contents(backend)
    with pytest.raises(NotFound):
        reg.run("none")
    assert contents(backend) == before


def test_opening_a_small_run_takes_three_round_trips(backend, open_registry):
    open_registry(backend).create_run("r").save(small_state(), step=1)
    calls = []
    registry_ = open_registry(Metered(backend, calls))
    calls.clear()
    registry_.run("r")
    assert sorted(call.method for call in calls) == ["get", "get", "list", "list"]


# Files that are none of ours


@pytest.mark.parametrize("key", ["runs/.DS_Store", "runs/notes.txt", "runs/x/readme"])
def test_other_files_among_the_runs_are_no_runs(reg, run, backend, key):
    checkpoint = run.save(small_state(), step=1)
    backend.put(key, b"x")
    assert reg.checkpoint(checkpoint.digest.hex()[:12]).digest == checkpoint.digest
    assert set(reg.run_names()) <= {"run", "x"}


# What the face refuses in another way than it says


@pytest.mark.parametrize(
    "ask",
    [
        lambda reg: reg.create_run("r", monitor="loss"),
        lambda reg: reg.create_run("r", input_hash=5),
        lambda reg: reg.run(5),
    ],
    ids=["monitor", "input_hash", "run id"],
)
def test_a_wrong_argument_is_invalid_input(reg, ask):
    with pytest.raises(InvalidInput):
        ask(reg)


def test_unknown_places_are_refused():
    with pytest.raises(InvalidLocation):
        holdfast.open("gopher://host/x")


def test_opening_nothing_says_how_to_make_it(tmp_path):
    with pytest.raises(NotFound, match=r"not a registry; expected registry\.json.*`holdfast\.init"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data[:-1], Damaged),
        (lambda data: b"", Damaged),
        (lambda data: data.replace(b"passed", b"pAssed").replace(b"skipped", b"skippeD"), Damaged),
    ],
)
def test_a_damaged_config_is_refused(change, error):
    backend = new_backend()
    backend.put("registry.json", change(backend.get("registry.json")))
    with pytest.raises(error, match=r"registry\.json"):
        open_on(backend)


def test_a_registry_that_demands_a_newer_writer_is_refused():
    from holdfast.registry.objects.framing import join_lines

    backend = MemoryBackend()
    config = RegistryConfig(id="0" * 32, created_ms=1, race_probe="passed", min_writer=99)
    backend.put("registry.json", join_lines([config.encode()]))
    with pytest.raises(
        UnsupportedFormat, match="expected writer version 99; found writer version 4"
    ):
        open_on(backend)
