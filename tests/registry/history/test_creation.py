"""Creating runs: commit 0, refused options, and warnings before it is committed."""

from __future__ import annotations

import warnings

import pytest

from holdfast import Monitor
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history.creating import RunOptions, SecretWarning, begin, creation
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects import slot_key
from holdfast.registry.spec import Phase, Retention, RunSpec
from holdfast.registry.spec.presets import load_preset
from holdfast.registry.values import author
from tests.support.states import small_state
from tests.support.stores import contents

LOSS = Monitor(metric="loss", mode="min")
OWN = 'name = "own"\n[[phases]]\nname = "a"\n'


# Presets, monitors, policies


def test_a_run_carries_its_specification(reg, tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    for i, preset in enumerate(["default", tmp_path / "own.toml", RunSpec(name="x")]):
        run = reg.create_run(f"r{i}", preset=preset)
        expected = preset if isinstance(preset, RunSpec) else load_preset(preset)
        assert reg.run(f"r{i}").manifest.spec == run.manifest.spec == expected
        assert run.manifest.created.monitors == ()


def test_without_any_everything_is_kept_and_said_so(reg, caplog):
    with caplog.at_level("INFO", "holdfast"):
        run = reg.create_run("r")
        reg.create_run("s", preset="default")
    assert run.manifest.spec == RunSpec()
    assert [record.getMessage() for record in caplog.records] == [
        "r: no preset: every checkpoint is kept"
    ]


def test_monitor_and_retention_take_the_place_of_the_presets(reg):
    acc = Monitor(metric="acc", mode="max")
    run = reg.create_run("r", preset="default", monitor=acc, retention=Retention(last=1))
    assert (run.manifest.spec.name, run.manifest.spec.monitors) == ("default", (acc,))
    assert run.manifest.spec.retention == Retention(last=1)
    assert reg.create_run("s", retention=Retention(last=2)).manifest.spec.retention == Retention(
        last=2
    )


REFUSED = {
    "no such preset": ({"preset": "defualt"}, NotFound, "no such preset"),
    "no policy": ({"retention": 3}, InvalidInput, "not a policy; expected Retention"),
    "no monitor": ({"monitor": ["loss"]}, InvalidInput, "not a monitor"),
    "path as monitor": ({"monitor": Monitor(metric="..", mode="min")}, InvalidInput, "step of a"),
    "path in a monitor": (
        {"monitor": Monitor(metric="loss", mode="min", name="a/./b")},
        InvalidInput,
        r"step of a path.*RUN/best/NAME",
    ),
    "best without a monitor": (
        {"retention": Retention(best=1)},
        InvalidInput,
        "retention keeps the best, but there is no monitor",
    ),
    "best of a preset without a monitor": (
        {"preset": RunSpec(name="x"), "retention": Retention(best=1)},
        InvalidInput,
        "preset x.*retention keeps the best, but there is no monitor",
    ),
    "two monitors of a name": (
        {"monitor": [LOSS, LOSS]},
        InvalidInput,
        "monitor loss is declared twice",
    ),
    "a policy beside phases": (
        {"preset": RunSpec(name="x", phases=(Phase(name="1"),)), "retention": Retention(last=1)},
        InvalidInput,
        "preset x: this preset has its own monitors and retention",
    ),
    "a phase that would be read as another ref": (
        {"preset": RunSpec(name="x", phases=(Phase(name="latest"),))},
        InvalidInput,
        "'latest': a phase of this name would be read as another ref",
    ),
    "a phase number with a zero": (
        {"preset": RunSpec(name="x", phases=(Phase(name="01"),))},
        InvalidInput,
        "'01': a phase number has no leading zeros",
    ),
    "no hash": ({"input_hash": 5}, InvalidInput, "an input hash is a string"),
    "no owner": ({"owner": "Ana B"}, InvalidInput, "not an owner; expected 1 to 128 letters"),
    "no project": ({"project": ""}, InvalidInput, "not a project"),
    "one text as labels": ({"labels": "prod"}, InvalidInput, "labels are a list of texts"),
    "no label": ({"labels": ["a", 7]}, InvalidInput, "not a label"),
    "many labels": ({"labels": [*map(str, range(33))]}, InvalidInput, "at most 32 texts"),
}


@pytest.mark.parametrize(("options", "error", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_contradicts_itself_begins_no_run(reg, backend, options, error, told):
    before = contents(backend)
    with pytest.raises(error, match=told):
        reg.create_run("r", **options)
    with pytest.raises(error, match=told):
        reg.run("r", create=True, **options)
    assert contents(backend) == before


def test_a_run_of_an_older_version_with_two_monitors_of_a_metric_is_read(reg):
    log = RunLog(reg.handle.store, "old")
    both = (LOSS, Monitor(metric="loss", mode="max"))
    begin(log, creation(RunOptions()).changed(monitors=both))
    run = reg.run("old")
    run.save(small_state(1), step=1, metrics={"loss": 1.0})
    assert run.best().step == 1
    assert run.manifest.monitors == both


# The same line of a job script after a requeue


def test_a_run_is_continued_by_the_line_that_began_it(reg):
    options = {"preset": "default", "monitor": LOSS, "config": {"lr": 1}}
    first = reg.run("r", create=True, **options)
    first.save(small_state(), step=1)
    again = reg.run("r", create=True, **options)
    assert again.latest().digest == first.latest().digest


@pytest.mark.parametrize(
    "options",
    [
        {"preset": RunSpec(name="other")},
        {"preset": "default", "retention": Retention(last=1)},
        {"monitor": Monitor(metric="acc", mode="max")},
        {"retention": Retention(last=7)},
    ],
)
def test_another_line_is_a_conflict(reg, options):
    reg.create_run("r", preset="default")
    with pytest.raises(
        Conflict, match=r"r: the run was created with (another preset|other monitors)"
    ):
        reg.run("r", create=True, **options)
    assert reg.run("r", create=True).manifest.spec.name == "default"


DESCRIBED = {"config": {"lr": 1, "when": "now"}, "seed": 7, "input_hash": "data"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seed": 8}, "r: the run was created with another seed; expected 7; found 8"),
        ({"input_hash": "x"}, "r: .* other input data; expected data; found x"),
        ({"config": {"lr": 2}, "seed": 0}, "another seed; expected 7; found 0"),
    ],
)
@pytest.mark.parametrize("create", [True, False])
def test_another_seed_or_input_is_a_conflict(reg, backend, options, told, create):
    reg.create_run("r", **DESCRIBED)
    before = contents(backend)
    with pytest.raises(Conflict, match=told):
        reg.run("r", create=create, **options)
    assert contents(backend) == before
    assert reg.run("r", create=create, **DESCRIBED).manifest.created.input_hash == "data"


def test_the_planned_end_is_that_of_the_creation_and_of_forks(reg):
    run = reg.create_run("a", total_steps=500)
    run.save(small_state(1), step=100)
    assert reg.run("a").manifest.created.total_steps == 500
    assert reg.fork("a/latest", "b").manifest.created.total_steps == 500
    assert reg.fork("a/latest", "c", total_steps=900).manifest.created.total_steps == 900
    assert reg.create_run("d").manifest.created.total_steps is None
    for wrong in (0, True, 1.5, 2**63):
        with pytest.raises(InvalidInput, match="not a step at which training can end"):
            reg.create_run("e", total_steps=wrong)


def test_owner_project_and_labels_are_those_of_the_creation(reg, backend, caplog):
    plain, words = reg.create_run("plain"), {"owner": "ana", "project": "vision/det"}
    line = backend.get(slot_key("plain", 0))
    assert not any(b'"%b"' % name in line for name in (b"owner", b"project", b"labels"))
    run = reg.create_run("r", labels=["x", "prod", "x"], **words)
    run.save({"w": 1}, step=1)
    with caplog.at_level("WARNING", "holdfast"):
        again = reg.run("r", create=True, labels={"x", "prod"}, **words)
        assert not caplog.records
        reg.run("r", owner="ben", labels=["x"])
    assert [one.getMessage()[:11] for one in caplog.records] == ["r: `owner` ", "r: `labels`"]
    created = again.manifest.created
    assert (created.owner, created.project, created.labels) == ("ana", "vision/det", ("prod", "x"))
    own = reg.fork("r", "own").manifest.created  # a fork is somebody else's
    assert (own.owner, own.project, own.labels) == (None, "vision/det", None)
    # The owner of a run without one is the user who created it, also where a snapshot hides that.
    for step in range(20):
        plain.save({"w": step}, step=step)
    line = plain.handle.log
    assert line.owner() == author().rpartition("@")[0]
    other = RunLog(line._store, "plain")
    other.open()
    assert other.tail.author is None
    assert (other.owner(), again.handle.log.owner()) == (line.owner(), "ana")


def test_an_input_that_was_not_given_before(reg):
    reg.create_run("r")
    with pytest.raises(Conflict, match="expected no input hash; found data"):
        reg.run("r", input_hash="data")


@pytest.mark.parametrize("options", [{"seed": "7"}, {"seed": -1}, {"input_hash": 5}])
def test_what_is_wrong_is_refused_for_a_run_that_exists_too(reg, options):
    reg.create_run("r", **DESCRIBED)
    with pytest.raises(InvalidInput, match=r"not a seed|an input hash is a string"):
        reg.run("r", **options)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"lr": 1, "when": "later"}, "when"),
        ({"lr": 1.0, "when": "later"}, "lr"),
        ({"when": "now"}, "lr"),
        ({"lr": 1, "when": "now", "extra": None}, "extra"),
        ({"lr": {"deep": 1}, "when": "now"}, "lr"),
        (["lr"], "lr"),
    ],
)
def test_another_configuration_is_warned_of_by_its_first_difference(reg, caplog, config, key):
    reg.create_run("r", **DESCRIBED)
    caplog.clear()
    assert reg.run("r", create=True, config=config).config == DESCRIBED["config"]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("holdfast", "WARNING")
    assert (
        f"r: the configuration differs from the one that the run was created with, first at {key};"
        in (record.getMessage())
    )


@pytest.mark.parametrize("config", [DESCRIBED["config"], {"when": "now", "lr": 1}, None])
def test_the_same_configuration_is_not_warned_of(reg, caplog, config):
    reg.create_run("r", **DESCRIBED)
    reg.run("r", create=True, config=config)
    reg.run("s", create=True, config=config)
    reg.run("s", create=True, config=config)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_configuration_of_numbers_that_are_none_equals_itself(reg, caplog):
    for _ in range(2):
        reg.run("r", create=True, config={"a": float("nan"), "b": [1]})
    assert caplog.records == []
    reg.run("r", config={"a": float("nan"), "b": [2]})
    assert "first at b/0;" in caplog.text


# Secrets


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"password": "x"}, ["password"]),
        ({"db": {"PASSWD": "x"}, "HF_TOKEN": "y"}, ["db.PASSWD", "HF_TOKEN"]),
        ({"stores": [{"aws_secret_access_key": "x"}]}, ["stores[0].aws_secret_access_key"]),
        ({"api-key": "x", "wandb_api_key": "y"}, ["api-key", "wandb_api_key"]),
        ({"credentials": "x"}, ["credentials"]),
    ],
)
def test_secrets_are_warned_of_before_they_enter_the_log(reg, backend, config, told):
    before = contents(backend)
    with pytest.raises(SecretWarning, match="looks as if it held a secret") as caught:
        reg.create_run("r", config=config)  # warnings are errors here
    assert all(name in str(caught.value) for name in told)
    assert contents(backend) == before


def test_the_warning_points_at_the_callers_line(reg):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reg.create_run("r", config={"secret": "x"})
    assert [one.filename for one in caught] == [__file__]
    assert reg.run("r").config == {"secret": "x"}  # what somebody wants is done all the same


@pytest.mark.parametrize(
    "config",
    [
        {"tokens": 5, "n_tokens": "50k", "passes": "two", "token": "<eos>"},
        {"password": "", "api_key": None, "secret": 5},
        {"monkey": "x", "keyboard": "y", "tokenizer": "bpe", "compass": "n"},
    ],
)
def test_what_only_looks_a_little_like_one_is_let_alone(reg, config):
    assert reg.create_run("r", config=config).config == config
