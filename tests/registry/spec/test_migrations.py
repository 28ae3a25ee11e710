"""Migrations take registered steps only, by the shortest way, and say what they lose."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from functools import partial

import pytest

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.spec import migrations
from holdfast.registry.spec.migrations import LossyMigration, Migrations, register_migration


def step(target, key="version"):
    """Return a migration that notes where it was."""

    def migrate(state):
        state[key] = target
        state["way"] = [*state.get("way", []), target]
        return state

    return migrate


def table(*pairs, lossy=()):
    found = Migrations()
    for source, target in pairs:
        found.register(source, target, step(target), lossy=(source, target) in lossy)
    return found


UP = [(1, 2), (2, 3), (3, 4)]


def test_up_by_every_step():
    state = {"version": 1, "model": [1]}
    assert table(*UP).apply(state, "version", 4) == {
        "version": 4,
        "model": [1],
        "way": [2, 3, 4],
    }


def test_dotted_versions():
    steps = table(("1.0", "1.1"), ("1.1", "1.2.5"), ("1.9", "1.10"), ("1.2.5", "1.9"))
    assert steps.apply({"v": "1.0", "version": 0}, "version", 0)["v"] == "1.0"
    assert steps.apply({"version": "1.0"}, "version", "1.10")["way"] == [
        *("1.1", "1.2.5", "1.9", "1.10"),
    ]
    # Without a patch it is patch 0.
    assert steps.apply({"version": "1.0.0"}, "version", "1.1.0")["version"] == "1.1"


def test_the_given_state_is_not_changed():
    state = {"version": 1, "model": [1]}
    before = copy.deepcopy(state)
    result = table(*UP).apply(state, "version", 3)
    assert state == before
    assert result is not state
    assert result["model"] is state["model"]
    same = table().apply(state, "version", 1)
    assert same == state
    assert same is not state


def test_the_type_of_the_state_stays():
    state = OrderedDict(version=1)
    assert type(table(*UP).apply(state, "version", 2)) is OrderedDict


def test_the_shortest_way():
    steps = table(*UP, (2, 4))
    assert steps.apply({"version": 1}, "version", 4)["way"] == [2, 4]


@pytest.mark.parametrize("turn", [1, -1])
def test_of_two_shortest_ways_always_the_same(turn):
    ways = [(1, 2), (2, 4), (1, 3), (3, 4)][::turn]
    assert table(*ways).apply({"version": 1}, "version", 4)["way"] == [2, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = table(*ways, lossy=[(2, 4)])
        assert steps.apply({"version": 1}, "version", 4)["way"] == [3, 4]


def test_one_direction_only():
    with pytest.raises(IncompatibleState, match="no migration from 1 to 2"):
        table((1, 3), (3, 2)).apply({"version": 1}, "version", 2)
    with pytest.raises(IncompatibleState, match="no migration from 3 to 2"):
        table((3, 1), (1, 2)).apply({"version": 3}, "version", 2)


def test_down_only_where_it_is_registered():
    with pytest.raises(IncompatibleState, match=r"no migration from 4 to 2.*registered: 1 -> 2, 2"):
        table(*UP).apply({"version": 4}, "version", 2)
    assert table(*UP, (4, 3), (3, 2)).apply({"version": 4}, "version", 2)["way"] == [3, 2]


def test_a_lossy_step_warns_and_names_both_versions():
    steps = table((4, 3), (3, 2), lossy=[(3, 2)])
    with pytest.warns(LossyMigration, match="from 3 -> 2 loses information") as caught:
        assert steps.apply({"version": 4}, "version", 2)["version"] == 2
    (warning,) = caught
    assert warning.filename == __file__
    assert issubclass(LossyMigration, UserWarning)


def test_a_warning_made_an_error_stops_before_the_step():
    ran = []
    steps = Migrations()
    steps.register(2, 1, lambda state: ran.append(1), lossy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LossyMigration):
            steps.apply({"version": 2}, "version", 1)
    assert ran == []


@pytest.mark.parametrize(
    ("found", "wanted"), [("1.9", "2.0"), ("2.0", "1.9"), (1, "1.0"), ("1.0", 2)]
)
def test_no_way_leads_across_a_major_version(found, wanted):
    steps = Migrations()
    with pytest.raises(IncompatibleState, match="would cross a major version"):
        steps.apply({"version": found}, "version", wanted)
    with pytest.raises(InvalidInput, match="must stay within a major version"):
        steps.register(found, wanted, step(wanted))


def test_what_is_registered_is_named():
    with pytest.raises(IncompatibleState, match="no migration from 1 to 9") as caught:
        table((3, 4), (1, 2)).apply({"version": 1}, "version", 9)
    assert caught.value.expected == "steps that lead there; registered: 1 -> 2, 3 -> 4"
    with pytest.raises(IncompatibleState, match="registered: none"):
        table().apply({"version": 1}, "version", 9)


@pytest.mark.parametrize(
    "version",
    [-1, True, 1.0, None, "1", "1.2.3.4", "01.1", "1.1-a", "1.1\n", "", "9" * 5000, b"1.0"],
)
def test_what_is_no_version(version):
    with pytest.raises(IncompatibleState, match=r"state\['version'\]: not a version"):
        table().apply({"version": version}, "version", 1)
    with pytest.raises(InvalidInput, match="not a version; expected a whole number") as caught:
        table().apply({"version": 1}, "version", version)
    assert not isinstance(caught.value, IncompatibleState)
    for ends in ((version, 1), (1, version)):
        with pytest.raises(InvalidInput, match="not a version"):
            Migrations().register(*ends, step(1))


def test_a_state_without_a_version():
    with pytest.raises(IncompatibleState, match=r"state\['version'\]: a state without a version"):
        table(*UP).apply({"v": 1}, "version", 2)
    with pytest.raises(IncompatibleState, match="not a state; expected a dict"):
        table(*UP).apply([], "version", 2)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda state: state, r"1 -> 2 did not set the version; expected 2; found 1"),
        (lambda state: state | {"version": 3}, "1 -> 2 did not set the version"),
        (lambda state: {}, "1 -> 2 failed: .*a state without a version"),
        (lambda state: None, "1 -> 2 failed: not a state"),
        (lambda state: state | {"version": "x"}, "1 -> 2 failed: .*not a version"),
    ],
)
def test_a_step_that_does_not_do_what_it_says(result, said):
    steps = Migrations()
    steps.register(1, 2, result)
    steps.register(2, 3, step(3))
    with pytest.raises(IncompatibleState, match=said):
        steps.apply({"version": 1}, "version", 3)


def test_an_error_of_a_step_says_which():
    def migrate(state):
        raise KeyError("weights")

    steps = Migrations()
    steps.register(1, 2, migrate)
    with pytest.raises(KeyError, match="weights") as caught:
        steps.apply({"version": 1}, "version", 2)
    assert caught.value.__notes__ == ["while migrating a state from 1 -> 2"]


def test_registering_again_replaces_the_same_function_only():
    steps = Migrations()
    steps.register("1.0", "1.1", step("1.0"))
    steps.register("1.0.0", "1.1.0", step("1.1"))  # another object, as of a reloaded module
    assert steps.apply({"version": "1.0"}, "version", "1.1")["version"] == "1.1"
    with pytest.raises(InvalidInput, match=r"1\.0 -> 1\.1: migration is taken; found .*migrate"):
        steps.register("1.0", "1.1", dict)
    with pytest.raises(InvalidInput, match="taken"):
        steps.register("1.0", "1.1", partial(step("1.1")))


def test_registrations_that_make_no_sense():
    with pytest.raises(InvalidInput, match="must lead to another version"):
        Migrations().register("1.0", "1.0.0", step("1.0"))
    with pytest.raises(InvalidInput, match="needs a function"):
        Migrations().register(1, 2, "os.system")


def test_the_table_of_the_process(monkeypatch):
    monkeypatch.setattr(migrations, "MIGRATIONS", Migrations())
    register_migration(1, 2, step(2))
    register_migration(2, 1, step(1), lossy=True)
    assert migrations.MIGRATIONS.apply({"version": 1}, "version", 2)["version"] == 2
    with pytest.warns(LossyMigration):
        migrations.MIGRATIONS.apply({"version": 2}, "version", 1)
