"""The writer's rules W1 to W5 and W2a, against epochs and marks made by hand."""

from __future__ import annotations

import pytest

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    Malformed,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import Place
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.epochs import Epochs, encode_sweep, encode_upgrade
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.placement import PackRef, Placement, Rows
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import ChosenKeys, Condemned, ObjectWriter, placed_keys
from tests.support.collectors import collect, mark, sweep
from tests.support.faults import Hooked, Once, flip
from tests.support.inline import without_threads
from tests.support.states import same, small_state
from tests.support.stores import contents, objects, packs_of


@pytest.fixture
def orphans(reg, backend):
    """Objects of a state that some crashed save left behind: whole and named by nothing."""
    other = reg.create_run("other")
    other.save(small_state(), step=1)
    for key in [key for key in contents(backend) if key.startswith("runs/other/")]:
        backend.delete(key)
    return sorted(objects(backend))


def generations(backend) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key in objects(backend):
        found.setdefault(key.rpartition(".")[0], []).append(int(key.rpartition(".")[2]))
    return {stem: sorted(numbers) for stem, numbers in found.items()}


# W1


def test_w1_an_epoch_that_could_not_be_read_early_is_read_when_it_is_needed(
    run, open_registry, backend, monkeypatch
):
    read, asked = Epochs.observe, []

    def away_at_first(epochs):
        asked.append(1)
        if len(asked) == 1:
            raise StoreUnavailable("away", where="epochs/")
        return read(epochs)

    mine = without_threads(open_registry(backend)).run("run")
    monkeypatch.setattr(Epochs, "observe", away_at_first)
    assert same(mine.exchange.push(small_state(), step=1).load(), small_state())
    assert len(asked) > 1


# W2


def test_w2_an_existing_pack_of_the_right_size_is_used_again(orphans, run, backend):
    before = contents(backend)
    checkpoint = run.save(small_state(), step=1)
    after = contents(backend)
    assert objects(backend) == set(orphans)
    assert {key: after[key] for key in orphans} == {key: before[key] for key in orphans}
    assert set(packs_of(checkpoint)) <= set(orphans)


def test_w2_a_condemned_pack_is_never_named_again_but_put_anew(orphans, run, backend, reg):
    sweep(backend, 1, [key for key in orphans if key.startswith("packs/")])
    checkpoint = run.save(small_state(), step=1)
    assert all(key.endswith(".1") for key in packs_of(checkpoint))
    collect(backend, [key for key in orphans if key.startswith("packs/")])
    assert same(reg.run("run").latest().load(), small_state())


def test_w2_condemned_manifests_and_placements_are_put_anew_as_well(
    orphans, run, backend, open_registry
):
    sweep(backend, 1, orphans)
    run.save(small_state(), step=1)
    collect(backend, orphans)
    fresh = open_registry(backend)
    assert same(fresh.run("run").latest().load(), small_state())
    assert fresh.verify(deep=True).ok
    assert all(key.endswith(".1") for key in objects(backend))


def test_w2_a_newer_generation_is_used_where_the_older_one_is_condemned(orphans, reg, backend):
    sweep(backend, 1, orphans)
    first = reg.create_run("a").save(small_state(), step=1)
    before = objects(backend)
    second = reg.create_run("b").save(small_state(), step=1)
    assert packs_of(second) == packs_of(first)
    assert objects(backend) == before


def test_w2_a_key_of_a_later_generation_than_its_sweep_is_sound(orphans, run, backend, reg):
    sweep(backend, 1, orphans)
    run.save(small_state(), step=1)
    sweep(backend, 2, orphans)
    later = reg.create_run("later").save(small_state(), step=1)
    assert all(key.endswith(".1") for key in packs_of(later))


def test_w2_new_objects_get_the_observed_epoch(run, backend):
    for epoch in (1, 2, 3):
        sweep(backend, epoch, [])
    run.save(small_state(), step=1)
    assert set(map(tuple, generations(backend).values())) == {(3,)}


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_w2_a_torn_pack_of_the_right_name_is_replaced(orphans, run, backend, open_registry, cut):
    torn = [key for key in orphans if key.startswith("packs/")]
    for key in torn:
        backend.put(key, backend.get(key)[:cut])
    run.save(small_state(), step=1)
    fresh = open_registry(backend)
    assert same(fresh.run("run").latest().load(), small_state())
    assert fresh.verify(deep=True).ok
    assert objects(backend) == set(orphans)


@pytest.mark.parametrize("kind", ["manifests", "placements"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "another"])
def test_w2_a_damaged_manifest_or_placement_is_replaced(
    orphans, run, backend, open_registry, kind, harm
):
    (key,) = [key for key in orphans if key.startswith(kind)]
    (other,) = [key for key in orphans if key.startswith({"manifests": "pl"}.get(kind, "ma"))]
    if harm == "flip":
        flip(backend, key)
    else:
        data = {"cut": backend.get(key)[:-5], "empty": b"", "another": backend.get(other)}[harm]
        backend.put(key, data)
    run.save(small_state(), step=1)
    assert same(open_registry(backend).run("run").latest().load(), small_state())


def test_w2_a_manifest_in_other_bytes_of_the_same_content_is_left_as_it_is(
    orphans, run, backend, open_registry
):
    import hashlib

    import zstandard

    from holdfast.registry.objects.framing import unwrap_frame

    (key,) = [key for key in orphans if key.startswith("manifests/")]
    frame = zstandard.ZstdCompressor(level=19).compress(unwrap_frame(backend.get(key), where="x"))
    other = frame + hashlib.sha256(frame).digest()
    backend.put(key, other)
    run.save(small_state(), step=1)
    assert backend.get(key) == other
    assert same(open_registry(backend).run("run").latest().load(), small_state())


# W1


def test_w1_the_run_exists_before_the_epoch_is_observed(backend, open_registry):
    calls = []
    registry = open_registry(Metered(backend, calls))
    registry.create_run("new").save(small_state(), step=1)
    order = [
        call.key
        for call in calls
        if call.key == "epochs/" or (call.method == "put_if_absent" and call.key.endswith("0" * 20))
    ]
    # The first listing only asks whether the registry is frozen.
    assert order[:3] == ["epochs/", "runs/new/log/" + "0" * 20, "epochs/"]


def test_w1_a_handle_observes_for_itself(reg, run, backend, open_registry):
    run.save(small_state(), step=1)
    sweep(backend, 1, [])
    checkpoint = open_registry(backend).create_run("b").save(small_state(7), step=1)
    assert all(key.endswith(".1") for key in packs_of(checkpoint))


# W3


def test_w3_a_mark_between_planning_and_commit_asks_for_new_choices(
    orphans, backend, open_registry
):
    hooked = Hooked(backend)
    registry = open_registry(hooked)
    run = registry.create_run("run")

    def collector():
        sweep(backend, 1, orphans)
        mark(open_registry(backend).handle.store, "run", 1)
        collect(backend, orphans)

    hooked.before = Once("runs/run/log/", collector, "put_if_absent")
    run.save(small_state(), step=1)
    assert hooked.before.done
    fresh = open_registry(backend)
    assert same(fresh.run("run").latest().load(), small_state())
    assert fresh.verify(deep=True).ok
    assert all(key.endswith(".1") for key in objects(backend))


def test_w3_a_mark_that_condemns_nothing_of_it_costs_no_upload(orphans, backend, open_registry):
    hooked = Hooked(backend)
    run = open_registry(hooked).create_run("run")

    def collector():
        sweep(backend, 1, [ObjectKey("packs", Digest.of(b"elsewhere"), 0)])
        mark(open_registry(backend).handle.store, "run", 1)

    hooked.before = Once("runs/run/log/", collector, "put_if_absent")
    run.save(small_state(), step=1)
    assert hooked.before.done
    assert objects(backend) == set(orphans)


def test_w3_later_saves_use_the_epoch_of_the_mark(run, backend, reg):
    run.save(small_state(1), step=1)
    sweep(backend, 1, [])
    mark(reg.handle.store, "run", 1)
    run.save(small_state(2), step=2)
    # The mark is met while this save commits; the next one is planned after it.
    third = run.save(small_state(3), step=3)
    assert all(key.endswith(".1") for key in packs_of(third))


def test_w3_an_epoch_met_by_its_mark_may_demand_a_newer_writer(run, backend, reg):
    run.save(small_state(1), step=1)
    backend.put(epoch_key(1), encode_upgrade(1, 99))
    mark(reg.handle.store, "run", 1)
    before = run.manifest.commits
    with pytest.raises(UnsupportedFormat, match="demands a newer Holdfast"):
        run.save(small_state(2), step=2)
    assert run.manifest.commits == before


def test_w3_sweeps_that_never_end_are_told(orphans, backend, open_registry):
    hooked = Hooked(backend)
    run = open_registry(hooked).create_run("run")
    store = open_registry(backend).handle.store
    epochs = []

    def collector(method, key):
        if method == "put_if_absent" and key.startswith("runs/run/log/"):
            epochs.append(key)
            sweep(backend, len(epochs), objects(backend))
            mark(store, "run", len(epochs))

    hooked.before = collector
    with pytest.raises(Conflict, match="overtook this commit 5 times in a row"):
        run.save(small_state(), step=1)
    assert open_registry(backend).run("run").latest() is None


# W2a


def test_w2a_what_the_runs_own_checkpoints_use_needs_no_epoch(run, backend, reg):
    first = run.save(small_state(), step=1)
    sweep(backend, 1, packs_of(first))
    mark(reg.handle.store, "run", 1)
    # The sweep saw checkpoint 1 live, so it deletes nothing of it; it may be named on.
    changed = small_state() | {"extra": {"w": small_state(5)["model"]["w"]}}
    second = run.save(changed, step=2)
    assert set(packs_of(first)) <= set(packs_of(second))


def test_w2a_reads_no_epoch_entry_for_covered_keys(backend, open_registry):
    calls = []
    registry = open_registry(Metered(backend, calls))
    run = registry.create_run("run")
    run.save(small_state(), step=1)
    for epoch in (1, 2):
        sweep(backend, epoch, [])
    run = open_registry(Metered(backend, calls)).run("run")
    calls.clear()
    run.save(small_state(), step=2)
    read = [call.key for call in calls if call.method == "get" and call.key.startswith("epochs/")]
    assert read in ([], [epoch_key(2)])  # the newest is read once, for the writer version


def _placed(i: int, *packs: ObjectKey) -> tuple[Place, Placement]:
    manifest = Manifest("dict", {"m": Component.build(i, [])})
    placement = Placement(manifest.digest, tuple(PackRef(key, 10) for key in packs), Rows(()))
    place = Place(
        manifest=manifest.digest,
        manifest_generation=0,
        placement=placement.digest,
        placement_generation=0,
    )
    return place, placement


def _with_place(place: Place) -> RunManifest:
    """Return a run with a checkpoint in this place."""
    record = CheckpointRecord(
        n=1, manifest=place.manifest, phase="main", step=1, metrics={}, size_bytes=0, time_ms=0
    )
    return RunManifest(run_id="r", checkpoints=(record,), places=(place,))


PACK = ObjectKey("packs", Digest.of(b"pack"), 0)


def test_w2a_a_key_is_covered_while_a_place_that_used_it_stands():
    place, placement = _placed(1, PACK)
    chosen = ChosenKeys(frozenset({PACK}), {PACK: [place]})
    assert placed_keys(place, placement) >= {PACK}
    assert chosen.unproven(_with_place(place)) == set()
    assert chosen.unproven(RunManifest(run_id="r")) == {PACK}
    moved = place.changed(placement_generation=1)
    assert chosen.unproven(_with_place(moved)) == {PACK}


def test_w2a_a_place_of_what_the_run_needs_no_more_covers_nothing():
    place, _ = _placed(1, PACK)
    chosen = ChosenKeys(frozenset({PACK}), {PACK: [place]})
    (record,) = _with_place(place).checkpoints
    assert chosen.unproven(RunManifest(run_id="r", places=(place,))) == {PACK}
    evicted = record.changed(evicted="for room")
    kept = {"run_id": "r", "places": (place,)}
    assert chosen.unproven(RunManifest(**kept, checkpoints=(evicted,))) == {PACK}
    assert chosen.unproven(RunManifest(**kept, checkpoints=(record,), dropped="over")) == {PACK}


def test_w2a_one_of_several_places_is_enough():
    first, second = _placed(1, PACK)[0], _placed(2, PACK)[0]
    chosen = ChosenKeys(frozenset({PACK}), {PACK: [first, second]})
    assert chosen.unproven(_with_place(second)) == set()


def test_w2a_a_key_that_nothing_covers_is_unproven():
    place, _ = _placed(1, PACK)
    assert ChosenKeys(frozenset({PACK})).unproven(_with_place(place)) == {PACK}


def _annotate(state):
    from holdfast.registry.history.actions import SetStatus

    return [commit_line(state, [SetStatus(status="running")])]


def test_w2a_a_base_that_was_placed_anew_meanwhile_covers_no_more(run, backend, reg):
    first = run.save(small_state(), step=1)
    place, old = first.handle.reader.place, first.handle.reader.placement
    log = RunLog(reg.handle.store, "run")
    log.open()
    writer = ObjectWriter(reg.handle.store, log)
    assert writer.observe() == 0
    packs = frozenset(ref.key for ref in old.packs)
    chosen = ChosenKeys(packs, {key: [place] for key in packs})
    sweep(backend, 1, packs)
    mark(reg.handle.store, "run", 1)
    moved = place.changed(placement_generation=1)
    backend.put(f"{str(placement_of(place))[:-1]}1", backend.get(str(placement_of(place))))
    log.refresh()
    writer.commit(_annotate, chosen)  # still covered: the place stands
    log.append(lambda run: [moved])
    before = log.run.next_slot
    with pytest.raises(Condemned) as caught:
        writer.commit(_annotate, chosen)
    assert caught.value.keys == packs
    assert log.run.next_slot == before


def placement_of(place: Place) -> ObjectKey:
    return ObjectKey("placements", place.placement, place.placement_generation)


def test_a_commit_that_names_nothing_reads_no_epoch(run, backend, reg):
    log = RunLog(reg.handle.store, "run")
    log.open()
    backend.put(epoch_key(1), b"damaged")
    ObjectWriter(reg.handle.store, log).commit(_annotate, ChosenKeys())
    assert log.run.commits == 2


# Epochs that cannot be read


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (b"damaged", Damaged),
        (encode_sweep(2, []), Malformed),
        (encode_upgrade(1, 99), UnsupportedFormat),
    ],
    ids=["damaged", "another", "upgrade"],
)
def test_an_epoch_that_cannot_be_read_or_obeyed_refuses_the_write(
    run, backend, open_registry, entry, error
):
    backend.put(epoch_key(1), entry)
    before = contents(backend)
    with pytest.raises(error, match=r"epochs/0+1"):
        run.save(small_state(), step=1)
    assert contents(backend) == before


def test_a_gap_among_the_epochs_refuses_the_write(run, backend):
    sweep(backend, 2, [])
    before = contents(backend)
    with pytest.raises(Malformed, match="gap"):
        run.save(small_state(), step=1)
    assert contents(backend) == before


# What was found damaged


def test_a_distrusted_pack_is_replaced_though_its_size_is_right(orphans, reg, backend):
    key = next(key for key in orphans if key.startswith("packs/"))
    sound = backend.get(key)
    flip(backend, key, 40)
    log = RunLog(reg.handle.store, "run")
    reg.create_run("run")
    log.open()
    writer = ObjectWriter(reg.handle.store, log)
    parsed = ObjectKey.parse(key)
    assert writer.usable("packs", parsed.digest, len(sound)) == parsed
    writer.suspect.add(parsed)
    assert writer.usable("packs", parsed.digest, len(sound)) is None
    assert writer.put_pack(parsed.digest, [sound], len(sound)) == parsed
    assert backend.get(key) == sound
    assert parsed not in writer.suspect


def test_an_unknown_file_beside_a_pack_is_no_obstacle(orphans, run, backend):
    key = next(key for key in orphans if key.startswith("packs/"))
    backend.put(key[: key.rindex(".")] + ".-old", b"x")
    run.save(small_state(), step=1)


# W5


class Durable(Metered):
    """A store that notes what it is told to make durable, among the calls."""

    def __init__(self, inner) -> None:
        self.noted: list[tuple[str, str]] = []
        super().__init__(inner, self)

    def append(self, call) -> None:
        self.noted.append((call.method, call.key))

    def make_durable(self, keys) -> None:
        self.noted += [("make_durable", key) for key in keys]

    @property
    def made(self) -> set[str]:
        return {key for method, key in self.noted if method == "make_durable"}


@pytest.fixture
def noting(backend):
    return Durable(backend)


def test_w5_what_others_put_is_made_durable_before_the_slot(
    orphans, run, backend, noting, open_registry
):
    sweep(backend, 1, [ObjectKey("packs", Digest.of(b"gone"), 0)])
    other = open_registry(noting).run("run")
    noting.noted.clear()
    other.save(small_state(), step=1)
    (newest,) = (
        key for method, key in noting.noted if (method, key[:5]) == ("put_if_absent", "runs/")
    )
    before = noting.noted[: noting.noted.index(("put_if_absent", newest))]
    found = {key for key in orphans if key.startswith("packs/")}
    # Its manifest and placement it put itself, under the epoch that it saw.
    expected = {*found, epoch_key(1), "runs/run/log/" + "0" * 20}
    assert noting.made == {key for method, key in before if method == "make_durable"} == expected


def test_w5_a_mark_of_others_is_made_durable_with_its_epoch(run, backend, noting, open_registry):
    run.save(small_state(1), step=1)
    other = open_registry(noting).run("run")
    sweep(backend, 1, [ObjectKey("packs", Digest.of(b"gone"), 0)])
    mark(open_registry(backend).handle.store, "run", 1)
    other.pins.tags.set("keeper", other.latest())
    assert noting.made == {epoch_key(1), "runs/run/log/" + "2".zfill(20)}


def test_w5_manifests_and_placements_of_others_are_made_durable(
    orphans, run, noting, open_registry
):
    other = open_registry(noting).run("run")
    noting.noted.clear()
    other.save(small_state(), step=1)
    assert noting.made >= set(orphans)


def test_w5_what_a_place_covers_or_the_writer_put_costs_no_sync(run, noting, open_registry):
    run.save(small_state(1), step=1)
    other = open_registry(noting).run("run")
    other.restore()
    other.save(small_state(2), step=2)
    # The log, which others have written to.
    assert noting.made == {"runs/run/log/" + "1".zfill(20)}
    noting.noted.clear()
    for step in (3, 4):
        other.save(small_state(step), step=2 * step)
        other.save(small_state(step), step=2 * step + 1)
    assert not noting.made


def test_w5_after_a_lost_race_nothing_of_its_own_is_synced_again(noting, open_registry):
    other = open_registry(noting).create_run("other")
    once = Once(
        "runs/other/log/",
        lambda: open_registry(noting.inner).run("other").pins.tags.set("x", latest),
    )
    latest = other.save(small_state(1), step=1)
    hooked = Hooked(noting)
    hooked.before = once
    run = open_registry(hooked).run("other")
    noting.noted.clear()
    run.exchange.push(small_state(2), step=2)
    assert once.done
    assert not [key for key in noting.made if not key.startswith("runs/")]
