"""A release is refused unless its files agree, and the workflows run what the README names."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import release

    return release


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the files that name the version."""
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_files_of_this_checkout_agree(release: ModuleType) -> None:
    assert release.agreed_version(ROOT, is_final=False) == CONFIG["version"]


def test_the_newest_entry_of_the_changelog_is_read_in_three_minutes() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert len(newest.split()) <= 600


@pytest.mark.parametrize(
    ("file", "before", "after", "is_final", "says"),
    [
        ("CITATION.cff", "version: 0", "version: 9", False, "CITATION.cff names version"),
        ("CHANGELOG.md", "## 0", "## 9", False, "does not begin with a heading"),
        ("CHANGELOG.md", r"\(unreleased\)", "(2020-01-01)", True, "'2020-01-01' for the day"),
        ("CHANGELOG.md", "x^", "", True, "'unreleased' for the day"),
    ],
)
def test_files_that_disagree_are_refused(
    release: ModuleType, root: Path, file: str, before: str, after: str, is_final: bool, says: str
) -> None:
    text = (root / file).read_text()
    (root / file).write_text(re.sub(before, after, text, count=1, flags=re.MULTILINE))
    with pytest.raises(SystemExit, match=says):
        release.agreed_version(root, is_final=is_final)


def test_a_release_wants_a_clean_checkout_and_a_new_tag(release: ModuleType, root: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false")

    def git(*words: str) -> None:
        subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)

    git("init", "--quiet")
    with pytest.raises(SystemExit, match=r"not committed:\n.*CHANGELOG.md"):
        release.require_clean(root, "v1")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    release.require_clean(root, "v1")
    git("tag", "v1")
    with pytest.raises(SystemExit, match="v1 exists already"):
        release.require_clean(root, "v1")


def test_builds_that_differ_are_refused_and_checksums_are_those_of_the_files(
    release: ModuleType, tmp_path: Path
) -> None:
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.whl").write_bytes(b"b" if name == "other" else b"a")
    release.require_same(tmp_path / "one", tmp_path / "same")
    with pytest.raises(SystemExit, match="two builds differ"):
        release.require_same(tmp_path / "one", tmp_path / "other")
    release.write_checksums(tmp_path / "one")
    expected = f"{hashlib.sha256(b'a').hexdigest()}  a.whl\n"
    assert (tmp_path / "one" / "SHA256SUMS").read_text() == expected


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_exist_by_pinned_actions(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "run" in step:
            subprocess.run(["sh", "-n", "-c", step["run"]], check=True)
            for script in re.findall(r"sh (scripts/\w+)", step["run"]):
                assert (ROOT / script).is_file()
        else:
            pinned = re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            assert pinned or step["uses"] == "pypa/gh-action-pypi-publish@release/v1"


def test_a_release_publishes_the_packages_and_attaches_every_file(tmp_path: Path) -> None:
    """The shell lines of these jobs run as they stand; GitHub's own program is a double."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    packages = ["holdfast-1.2.3-py3-none-any.whl", "holdfast-1.2.3.tar.gz"]
    built = sorted([*packages, "SHA256SUMS", "holdfast.cdx.json"])
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >asked\n')
    gh.chmod(0o755)
    server = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "them/holdfast"}
    for job in ("publish", "page"):
        dist = tmp_path / job / "dist"
        dist.mkdir(parents=True)
        for name in built:
            (dist / name).touch()
        (line,) = [step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step]
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_REF_NAME": "v1.2.3", **server}
        subprocess.run(["bash", "-e", "-c", line], cwd=tmp_path / job, env=env, check=True)
    assert sorted(path.name for path in (tmp_path / "publish" / "packages").iterdir()) == packages
    assert (tmp_path / "page" / "asked").read_text().splitlines() == [
        *("release", "create", "v1.2.3", *(f"dist/{name}" for name in built), "--verify-tag"),
        *("--title", "Holdfast 1.2.3", "--notes"),
        "[Changes](https://host/them/holdfast/blob/v1.2.3/CHANGELOG.md)",
    ]


def test_the_check_runs_the_readme_on_every_python_that_is_claimed() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    (job,) = workflow["jobs"].values()
    claimed = [one.rpartition(" ")[2] for one in CONFIG["classifiers"] if "Python :: 3." in one]
    assert job["strategy"]["matrix"]["python"] == claimed
    first = re.findall(r"^sh scripts/\w+", (ROOT / "README.md").read_text(), re.M)[:2]
    assert set(first) <= {step.get("run") for step in job["steps"]}
