"""Gather the pages of the checkout, and build the site from them.

    python scripts/build_site.py FOLDER

FOLDER/pages mirrors the checkout, so that a link that leads somewhere in the checkout leads to the
same place in the site. Files that pages link, such as modules, become pages that show their text.
Blocks of the language `bob` are drawn by svgbob; the comment above each says what it shows.
FOLDER/site is the result.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SITE = ROOT / "docs" / "site"
_LINK = re.compile(r"(\[[^\]]*\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
_DRAWING = re.compile(r"^<!-- drawing: ([^\n]*) -->\n```bob\n(.*?)^```$", re.M | re.S)
#: Letters that svgbob would draw as lines: others stand for them while it draws.
_LETTERS = dict(zip('/()"', "\ue000\ue001\ue002\ue003", strict=True))
_DOCUMENTED = re.compile(r"(^::: .*\n)(?:    options:\n)?", re.M)
#: Pages of the reference about objects that calls return; their constructors are nobody's to call.
_OF_CALLS = ("registry", "run", "checkpoint", "results")
#: The languages of files by their endings.
_LANGUAGES = {".py": "python", ".toml": "toml", ".tf": "hcl"}


class Pages:
    """The pages of the site, written as they are found.

    Args:
        root: The checkout.
        to: The folder of the pages.
    """

    def __init__(self, root: Path, to: Path) -> None:
        self._root = root.resolve()
        self._to = to
        self._shown: set[Path] = set()

    def write(self) -> None:
        """Write every page, and the files that they link."""
        for page in self.own():
            text = self._relinked(page)
            if page.parent.name == "reference" and page.stem in _OF_CALLS:
                text = _DOCUMENTED.sub(
                    r"\1    options:\n      merge_init_into_class: false\n", text
                )
            self._put(page, self._drawn(page, text))
        for image in sorted((self._root / "docs" / "images").glob("*.png")):
            target = self._to / image.relative_to(self._root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image, target)

    def own(self) -> Iterator[Path]:
        """Yield the pages that people write."""
        yield from sorted(self._root.glob("*.md"))
        yield from sorted((self._root / "docs").rglob("*.md"))
        yield self._root / "terraform" / "README.md"
        yield from sorted((self._root / "examples").glob("*/README.md"))

    def _relinked(self, page: Path) -> str:
        """Return the text of a page, with links to files as links to the pages that show them."""

        def relink(found: re.Match[str]) -> str:
            target = (page.parent / found[2]).resolve()
            return found[1] + found[2].rstrip("/") + self._ending(target) + found[3]

        parts = _FENCED.split(page.read_text(encoding="utf-8"))
        parts[::2] = [_LINK.sub(relink, part) for part in parts[::2]]
        return "".join(parts)

    def _drawn(self, page: Path, text: str) -> str:
        """Return the text of a page with its diagrams as pictures, and write these."""
        from markdown_svgbob.wrapper import text2svg

        def draw(found: re.Match[str]) -> str:
            name = f"{page.stem}-{found.start():06}.svg"
            drawn = text2svg(found[2].translate(str.maketrans(_LETTERS))).decode()
            for letter, stand_in in _LETTERS.items():
                drawn = drawn.replace(stand_in, html.escape(letter))
            self._put(page.with_name(name), drawn)
            return f"![{found[1]}]({name})"

        return _DRAWING.sub(draw, text)

    def _ending(self, target: Path) -> str:
        """Return what makes a path the path of its page, and see to it that the page exists."""
        if target.suffix in (".md", ".png") or not target.exists():
            return ""  # a dead link is the generator's to find
        if (target / "README.md").exists():
            return "/README.md"
        self._show(target)
        return "/index.md" if target.is_dir() else ".md"

    def _show(self, target: Path) -> None:
        if target in self._shown:
            return
        self._shown.add(target)
        name = target.relative_to(self._root)
        front = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
        if target.is_dir():
            files = [one for one in sorted(target.iterdir()) if one.is_file()]
            listed = "\n".join(f"- [{one.name}]({one.name}{self._ending(one)})" for one in files)
            self._put(target / "index.md", front + listed + "\n")
        else:
            text = target.read_text(encoding="utf-8")
            # Tests are half of all that is shown; in colours they would take as long as all pages.
            language = "text" if name.parts[0] == "tests" else _LANGUAGES.get(target.suffix, "text")
            body = f"``````{language}\n{text}\n``````\n"
            self._put(target.with_name(f"{target.name}.md"), front + body)

    def _put(self, page: Path, text: str) -> None:
        path = self._to / page.relative_to(self._root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def build(folder: Path) -> int:
    """Build the site in a folder; return the exit status of the generator."""
    for name in ("pages", "site", ".cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    Pages(ROOT, folder / "pages").write()
    for name in ("site.css", "iframe-worker.js"):
        shutil.copyfile(_SITE / name, folder / "pages" / name)
    shutil.copyfile(_SITE / "mkdocs.yml", folder / "mkdocs.yml")
    source = folder / "src"
    source.unlink(missing_ok=True)
    source.symlink_to(ROOT / "src")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    made = Path(sys.argv[1]).resolve()
    status = build(made)
    print(f"{made / 'site' / 'index.html'}" if status == 0 else "the site was not built")
    sys.exit(status)
