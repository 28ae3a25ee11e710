"""The steps of a release, each of which can refuse it. Run it by `sh scripts/release`.

A release is a tag `vX.Y.Z` of a clean checkout whose `pyproject.toml`, `CITATION.cff` and
`CHANGELOG.md` name that version, the changelog with the day.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
UV = Path(sys.executable).with_name("uv")


def main() -> None:
    """Make a release, or everything but its tag."""
    parser = argparse.ArgumentParser(prog="sh scripts/release", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="everything but the tag")
    parser.add_argument("--tag", help="the tag that the version must have")
    parser.add_argument("--without-check", action="store_true", help="in a dry run: no tests")
    asked = parser.parse_args()
    if asked.without_check and not asked.dry_run:
        parser.error("--without-check is for --dry-run")
    version = agreed_version(ROOT, is_final=not asked.dry_run)
    tag = f"v{version}"
    if asked.tag not in (None, tag):
        raise SystemExit(f"the tag is {asked.tag}, the version of pyproject.toml {version}")
    if not asked.dry_run:
        require_clean(ROOT, tag)
    if not asked.without_check:
        step("sh", "scripts/check")
    built = build_twice(DIST)
    step(UV, "tool", "run", "twine", "check", "--strict", *built)
    step("sh", "scripts/wheel")
    write_bill_of_materials(DIST / "holdfast.cdx.json", built[0])
    write_checksums(DIST)
    if asked.dry_run:
        print(f"{tag} could be released: {', '.join(path.name for path in sorted(DIST.iterdir()))}")
        return
    step("git", "tag", "--annotate", "--message", f"Holdfast {version}", tag)
    print(f"tagged; `git push origin {tag}` publishes it")


def step(*words: str | Path) -> None:
    """Run a command of the release; its failure ends the release."""
    subprocess.run(words, cwd=ROOT, check=True)


def agreed_version(root: Path, *, is_final: bool) -> str:
    """Return the version that all files name; a final one has its day in the changelog."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    cited = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.M)
    if cited != [version]:
        raise SystemExit(f"CITATION.cff names version {cited}, pyproject.toml {version}")
    heading = re.search(r"^## (\S+) \((.+)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    if heading is None or heading[1] != version:
        raise SystemExit(f"CHANGELOG.md does not begin with a heading `## {version} (YYYY-MM-DD)`")
    today = datetime.now(UTC).date().isoformat()
    if is_final and heading[2] != today:
        raise SystemExit(f"CHANGELOG.md says {heading[2]!r} for the day; today is {today}")
    return version


def require_clean(root: Path, tag: str) -> None:
    """Refuse a release of what is not committed, or under a tag that exists."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    if changed := git("status", "--porcelain"):
        raise SystemExit(f"not committed:\n{changed}")
    if git("tag", "--list", tag):
        raise SystemExit(f"the tag {tag} exists already: a version is published once")


def build_twice(folder: Path) -> Sequence[Path]:
    """Build sdist and wheel twice, from two copies of the checkout; refuse files that differ."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        for number in ("first", "second"):
            copy = Path(work, number)
            subprocess.run(["git", "worktree", "add", "--detach", copy], cwd=ROOT, check=True)
            try:
                for target in ("sdist", "wheel"):
                    build = [sys.executable, "-m", "hatchling", "build", "-t", target]
                    subprocess.run(
                        [*build, "-d", Path(work, f"{number}-dist")], cwd=copy, check=True
                    )
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=ROOT, check=True)
        require_same(Path(work, "first-dist"), Path(work, "second-dist"))
        shutil.copytree(Path(work, "first-dist"), folder)
    return sorted(folder.iterdir(), key=lambda path: path.suffix != ".whl")


def require_same(one: Path, other: Path) -> None:
    """Refuse two folders of built files that differ in a byte."""
    first, second = ({path.name: digest(path) for path in it.iterdir()} for it in (one, other))
    if first != second:
        raise SystemExit(f"two builds differ: {first} and {second}")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_bill_of_materials(file: Path, wheel: Path) -> None:
    """Write what the wheel brings along, without extras, as CycloneDX."""
    with tempfile.TemporaryDirectory() as work:
        step(UV, "venv", "--quiet", "--python", sys.executable, work)
        step(UV, "pip", "install", "--quiet", "--python", Path(work, "bin", "python"), wheel)
        bill = ("cyclonedx-py", "environment", "--output-reproducible", "--output-file", file)
        step(UV, "tool", "run", "--from", "cyclonedx-bom", *bill, Path(work, "bin", "python"))


def write_checksums(folder: Path) -> None:
    """Write `SHA256SUMS`, which `sha256sum --check` reads."""
    lines = [f"{digest(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()
