"""The pages of the documents: their snippets run, their links lead somewhere, their commands exist.

The README and every guide run whole, in order, in a fresh folder, as a newcomer would type them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.registry.cli.app import app
from tests.support.pages import BLOCK, GUIDES, PAGES, README, ROOT, blocks, readers_own, run_page

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`(holdfast [a-z][^`]*)`")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [README, *GUIDES], ids=_name)
def test_every_snippet_runs(
    page: Path,
    newcomer: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if page.name == "cluster.md":
        request.getfixturevalue("s3_url")
        import boto3

        client = boto3.session.Session().client("s3")
        client.create_bucket(Bucket="my-bucket")
        client.close()
    names = readers_own()
    ran = run_page(page, names, monkeypatch)
    assert set(ran) == {block.language for block in blocks(page) if _runs(block.mark)} - {"json"}
    for made in (names.get("reg"), names.get("frugal")):
        if made is not None:
            made.close()


def _runs(mark: str) -> bool:
    return not mark.startswith("not run: ")


def test_the_guides_are_those_that_were_meant() -> None:
    """So that a page that is renamed or emptied is not passed over."""
    ran = {page.name: sum(_runs(block.mark) for block in blocks(page)) for page in GUIDES}
    whole = {
        "any-language.md": 3,
        "cluster.md": 3,
        "evaluator.md": 9,
        "first-steps.md": 7,
        "moving.md": 11,
        "operator.md": 7,
        "researcher.md": 10,
    }
    assert {name: min(ran[name], least) for name, least in whole.items()} == whole
    assert set(ran) - set(whole) == {"contributor.md"}


@pytest.mark.parametrize("page", [README, *GUIDES], ids=_name)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    for block in blocks(page):
        assert re.fullmatch(r"|iam|not run: \w.*", block.mark), block
        assert block.language in {"python", "sh", "text", "json"}, block


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{_name(page)}: {target}"
        assert not anchor or anchor in _anchors(found), f"{_name(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_site_reads_a_page_as_it_is_meant(page: Path) -> None:
    """Its Markdown wants four spaces before a list in a list, and keeps backslashes in code."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, re.M) == []
    assert re.findall(r"`[^`\n]*\\\|[^`\n]*`", text) == []
    assert re.findall(r"^\| .*\n\n(?=\| (?!.*\n\|[-:| ]+\n))", text, re.M) == []  # a torn table
    assert re.findall(r"^(?![-\s|#>\d]).+\n- .*", text, re.M) == []  # a list that is a paragraph


def test_the_list_of_all_pages_is_whole() -> None:
    listing = ROOT / "docs" / "README.md"
    linked = {(listing.parent / target).resolve() for target in _LINK.findall(listing.read_text())}
    assert [_name(page) for page in PAGES if page not in linked | {listing}] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_that_a_page_shows_exists_with_its_options(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_REGISTRY", "checkpoints")
    text = page.read_text(encoding="utf-8")
    for _, language, block in BLOCK.findall(text):
        if language in ("sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if language == "sh" or line.startswith("$ "):
                    _check(page, line, {"BadParameter"})
    # A sentence may leave out arguments.
    for call in _INLINE.findall(BLOCK.sub("", text).replace("\n", " ")):
        _check(page, call, {"BadParameter", "MissingParameter"})


def _check(page: Path, line: str, passed_over: set[str]) -> None:
    for words in _calls(line):
        try:
            _parse(words)
        except Exception as error:  # of the click that typer brings
            if type(error).__name__ not in passed_over:  # such as a file of the reader's
                pytest.fail(f"{_name(page)}: holdfast {shlex.join(words)}\n{error}")


def _calls(line: str) -> Iterator[list[str]]:
    words = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    words.whitespace_split = True
    call: list[str] | None = None
    for word in [*words, ";"]:
        if set(word) <= set("|&;()<>"):
            if call:
                yield call
            call = None
        elif call is not None:
            call.append(word)
        elif word == "holdfast" or word.endswith("/holdfast"):
            call = []


def _parse(words: list[str]) -> None:
    """Read a command line as the command does, and call nothing.

    Raises:
        click.UsageError: A command or option does not exist, or an argument is missing or too many.
    """
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "commands") and words:
        context = command.context_class(command, parent=context)
        name, command, words = command.resolve_command(context, words)
        if not hasattr(command, "commands"):
            command.make_context(name, list(words), parent=context)
