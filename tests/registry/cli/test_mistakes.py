"""Typical mistakes, and the message that each gets: what is wrong, and what to type instead."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.registry.errors import AccessDenied
from tests.support.commands import invoke

MISTAKES = (
    # Names of checkpoints
    ("show digits/step500", 3, "Did you mean digits/main/step00000500?"),
    ("show digits/main/500", 3, "Did you mean digits/main/step00000500?"),
    ("show digits/1000", 3, "Did you mean digits/main/step00001000?"),
    ("show digits/main/step501", 4, "no checkpoint at this step; found steps 500, 1000, 1500"),
    ("show digits@best", 3, "A ref has slashes: RUN/best"),
    ("show digits:latest", 3, "A ref has slashes: RUN/best, RUN/latest"),
    ("log digits/best", 3, "A run is named without a slash, such as 'digits'."),
    ("gate set digits/best g", 3, "A run is named without a slash, such as 'digits'."),
    ("show /digits", 3, "A ref begins with the name of a run: RUN/best"),
    ("ls digits/", 4, "`holdfast ls digits` lists its checkpoints"),
    ("tag set paper digits/best", 2, "give the ref first, then the name"),
    ("release publish 2.0.0 digits/best", 2, "give the ref first, then the name"),
    ("show digits/lates", 3, "Did you mean 'latest'?"),
    ("show digits/Best", 3, "Did you mean 'best'"),
    ("show digits/best/los", 4, "Did you mean 'loss'?"),
    ("show VIT-SWEEP-07", 4, "Did you mean 'vit-sweep-07'?"),
    ("show vit-sweep-7", 4, "Did you mean 'vit-sweep-07'?"),
    ("show digit", 4, "Did you mean 'digits'?"),
    ("show digits/tags/papre", 4, "Did you mean 'paper'?"),
    ("show digits/1.0.0", 3, "Did you mean 'releases/1.0.0'?"),
    ("show digits/v1.0.0", 3, "Did you mean 'releases/1.0.0'?"),
    ("show digits/paper", 3, "Did you mean 'tags/paper'?"),
    ("show digits/releases/v1.0.0", 4, "Did you mean '1.0.0'?"),
    ("show digits/gates/x", 4, "no such gate"),
    ("show digits/pool/v1", 4, "the pool is empty"),
    ("show abcdef0123", 4, "no checkpoint with this id"),
    ("ls digits/tag", 4, "expected pins, tags, gates, releases, artifacts, pool or streams"),
    # Files
    ("pull digits --to x.pt", 3, "model/w: a torch file of this state"),
    ("pull digits --to x.pt ", 3, "Write a .zarr, or one component of arrays as .npz"),
    ("pull digits --to x.safetensors", 3, "Choose one, such as `--only model`"),
    ("pull digits --to x", 3, "Choose the format by the extension of the path"),
    ("pull digits --to x.onnx", 8, "ONNX is out of scope"),
    ("pull digits", 2, "missing option '--to'"),
    ("pull digits --to -", 3, "to a file, not to a pipe"),
    ("pull digits --only modle --to x.npz", 4, "Did you mean 'model'?"),
    ("pull digits --to x.bin", 3, "Use --force to replace it"),
    ("pull digits --to out --layout hff", 3, "Did you mean 'hf'?"),
    ("pull digits --to out --layout preset", 3, "the run's preset has no layout"),
    ("pull digits --to out.pt --watch", 2, "a pull without --layout excludes --watch"),
    ("push x.bin", 2, "name the run"),
    ("push x.bin digits", 2, "--step N is needed"),
    ("push x.bin digits --step abc", 2, "'--step': not a whole number"),
    ("push nope.pt digits --step 5", 3, "nope.pt: no such file"),
    ("push x.bin digit --step 5", 4, "Did you mean 'digits'?"),
    ("push x.bin new --step 5", 4, "note: --create creates the run"),
    ("push x.bin digits --step 5 --metric loss=low", 2, "loss='low' is not a number"),
    ("push x.bin digits --step 5 --precision fp8", 3, "expected fp16, bf16, auto"),
    ("push x.bin digits --artifact a --step 3", 2, "--artifact excludes --step"),
    ("push x.bin new --layout hf", 3, "not a folder"),
    ("file show nope.pt", 3, "nope.pt: no such file"),
    # Commands and options
    ("delete digits", 2, "use `holdfast rm` or `holdfast run rm`"),
    ("rm digits --reason x", 3, "`holdfast run rm digits` drops the run"),
    ("rm digits/tags/paper --reason x", 3, "`holdfast tag rm digits/tags/paper` removes it"),
    ("rm digits/latest --reason x", 5, "found latest, best/loss, tags/paper"),
    ("run rm digits", 2, "missing option '--reason'"),
    ("runs", 2, "use `holdfast run ls`"),
    ("checkpoints", 2, "use `holdfast ls`"),
    ("best", 2, "use `holdfast ls '*/best'`"),
    ("plot", 2, "use `holdfast page` or `holdfast ui`"),
    ("releases", 2, "use `holdfast ls RUN/releases`"),
    ("prune digits --keep 3", 2, "no such option: --keep: use `--last`"),
    ("run ls --status failed", 2, "use `--where`"),
    ("run ls --limit 3", 2, "use `-n`"),
    ("pull digits -o x.pt", 2, "use `--to`"),
    ("diff --runs '*' --rank accuracy:max", 3, "They have loss"),
    ("ls 'vit*/latest'", 4, "no list for a pattern of runs; expected vit*/best or vit*"),
    ("bogus", 2, "no such command 'bogus'"),
    ("ls --colums x", 2, "--columns"),
    ("-r reg ls", 2, "Options of a command come after its name: `holdfast COMMAND -r`."),
    ("run --json ls", 2, "come after its name: `holdfast run COMMAND --json`."),
    ("bisect digits --good digits sh -c x", 2, "Write -- before CMD if -c is its own"),
    ("diff digits", 2, "two checkpoints are compared; --runs compares runs"),
    ("diff --runs digits", 3, "a run is compared with others"),
    ("log digits -n five", 2, "'-n': not a whole number"),
    ("prune digits --last 0", 2, "'--last': expected 1 or more"),
    ("prune digits", 3, "Give a policy, such as `--last 3`"),
    ("gc --grace 5y", 2, "not a duration such as 0, 30m, 12h or 7d"),
    ("tag rm paper", 3, "expected RUN/tags/NAME"),
    ("release publish digits v2", 3, "Leave out the 'v'"),
    ("bisect digits --good digits --bad digits --metric foo", 2, "such as 'loss>2.5'"),
    # Runs and registries
    ("ls other", 4, "`holdfast run ls` lists the runs"),
    ("run create digits", 5, "Choose another name"),
    ("run create x --monitor loss", 2, "METRIC:min or METRIC:max"),
    ("run create x --preset defalt", 4, "Did you mean 'default'?"),
    ("run create x --from digits/step500", 3, "Did you mean digits/main/step00000500?"),
    ("run create x --config nope.json", 3, "found No such file or directory"),
    ("run ls --where 'loss <'", 3, "A filter is such as: lr < 1e-3"),
    ("run ls --sort nope", 4, "no such column; expected run, status"),
    ("undo digits main/step500", 4, "a checkpoint that is kept"),
    ("ls -r nope", 4, "Create one with `holdfast init"),
    ("ls -r s3://", 3, "expected s3://BUCKET/PREFIX"),
    ("init reg", 5, "Name it with `--registry`"),
    ("sync reg", 2, "missing argument 'DST'"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a registry, in which nobody may make anything by mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    with holdfast.init(folder / "reg", skip_race_probe=True) as made:
        run = made.create_run("digits", monitor=holdfast.Monitor(metric="loss", mode="min"))
        for step in (500, 1000, 1500):
            state = {"model": {"w": np.arange(5.0) + step}, "epoch": step}
            run.save(state, step=step, metrics={"loss": 1 / step})
        run.pins.tags.set("paper", run.latest())
        run.releases.publish("1.0.0", run.latest())
        made.create_run("vit-sweep-07").save({"a": 1}, step=1)
    (folder / "x.bin").write_bytes(b"abc")
    return folder


def kept(place: Path) -> list[Path]:
    """Return the files, without those that a registry needs to work."""
    return sorted(one for one in place.rglob("*") if not {".tmp", ".probe"} & {*one.parts})


@pytest.mark.parametrize(
    "words",
    [
        "attest FILE",
        "push FILE digits --step 9",
        "pull digits --to FILE --layout hf",
        "push FILE x --layout hf",
    ],
)
def test_a_folder_that_may_not_be_searched_is_no_fault_of_holdfast(
    words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = str(place / "closed")

    def refused(real: Callable[..., Any], path: Any, *given: Any, **more: Any) -> Any:
        if str(path).startswith(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *given, **more)

    for name in ("stat", "lstat", "scandir", "open"):  # root may do everything
        monkeypatch.setattr(os, name, partial(refused, getattr(os, name)))
    assert invoke("doctor", "-r", f"{closed}/reg").exit_code == 8  # it failed, and says what
    result = invoke(*words.replace("FILE", f"{closed}/f.pt").split(), "-r", place / "reg")
    assert result.exit_code == 7
    assert result.stderr.startswith(f"error: {closed}")
    assert f"found user id {os.geteuid()}" in result.stderr
    with pytest.raises(AccessDenied, match="may not be read"):
        holdfast.formats.read(f"{closed}/f.pt")


def test_a_registry_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_REGISTRY", raising=False)
    assert "hint: Give -r PATH, or set HOLDFAST_REGISTRY;" in invoke("ls").stderr


@pytest.mark.parametrize(("typed", "status", "said"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_mistake_is_told_with_what_to_type(
    typed: str, status: int, said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOLDFAST_REGISTRY", "reg")
    before = kept(place)
    result = invoke(*shlex.split(typed))
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("error: ")
    assert "Error:" not in result.stderr
    assert said in result.stderr
    assert kept(place) == before


def test_a_tag_that_hides_no_other_name_is_set_with_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_REGISTRY", str(place / "reg"))
    assert "warning: digits/latest is another" in invoke("tag", "set", "digits", "latest").stderr
    assert invoke("tag", "rm", "digits/tags/latest").exit_code == 0
