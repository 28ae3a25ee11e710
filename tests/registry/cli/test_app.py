"""The table of commands: it says of each command what the command says of itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.registry.cli import app, completing, opening
from holdfast.registry.face.factory import open as open_registry
from tests.registry.cli.calling import Call, walk
from tests.support.commands import invoke
from tests.support.source import ROOT


def entries() -> Iterator[str]:
    yield from app._COMMANDS.values()
    for _, commands in app._GROUPS.values():
        yield from commands.values()


@pytest.mark.parametrize("entry", list(entries()))
def test_the_first_sentence_of_the_help_is_that_of_the_list(entry: str) -> None:
    where, _, about = entry.partition(": ")
    module, _, function = where.partition(".")
    command = getattr(import_module(f"{app.__package__}.{module}"), function)
    help_text = getdoc(command)
    assert help_text is not None
    assert " ".join(help_text.partition("\n\n")[0].split()) == about


def test_a_former_name_is_an_error_that_says_the_new_one(call: Call) -> None:
    commands = {" ".join(path) for path, _ in walk()}
    for typed in app._INSTEAD:
        refused = call(*typed.split(), "demo", status=2).stderr
        assert refused.startswith(f"error: there is no command `{typed}`: use `holdfast ")
        for one in re.findall(r"`holdfast ([^`]+)`", refused.splitlines()[0]):
            assert re.split(r" -| [A-Z']", one)[0] in commands, typed


@pytest.mark.parametrize(
    ("typed", "means", "old", "now"),
    [
        ("roll demo --csv", "ls demo --csv", "roll", "ls"),
        ("--debug run roll --csv", "run ls --csv", "run roll", "run ls"),
        ("catalog --csv", "run ls --csv", "catalog", "run ls"),
        ("ls --fields id demo", "ls --columns id demo", "ls --fields", "ls --columns"),
        ("ls demo --fields=id --csv", "ls demo --columns=id --csv", "ls --fields", "ls --columns"),
    ],
)
def test_an_old_command_or_option_works_and_says_the_new_one(
    call: Call, monkeypatch: pytest.MonkeyPatch, typed: str, means: str, old: str, now: str
) -> None:
    monkeypatch.setitem(app._RENAMED, old, (now, "0.3"))
    said = f"holdfast {old} is now holdfast {now}; the old name ends in version 0.3"
    expected = call(*means.split())
    assert expected.stderr == ""
    found = call(*typed.split())
    assert (found.stdout, found.stderr) == (expected.stdout, f"DeprecationWarning: {said}\n")


def test_words_after_two_dashes_are_not_options(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(app._RENAMED, "ls --fields", ("ls --columns", "0.3"))
    assert "ls --fields is now" in call("ls", "--fields=id", "--", "--fields", status=3).stderr
    assert "is now" not in call("ls", "--", "--fields", status=3).stderr
    assert "no such option" in call("run", "ls", "--fields", status=2).stderr


def test_completion_is_silent_about_former_names() -> None:
    shell = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast evict --c"}
    found = invoke(prog_name="holdfast", env={**shell, "COMP_CWORD": "2"})
    assert (found.stdout.strip(), found.stderr) == ("", "")


def completed(words: str, shell: str = "bash") -> list[str]:
    """Return what a shell is offered for the last of some words; nothing is said elsewhere."""
    env = {"_HOLDFAST_COMPLETE": f"complete_{shell}", "COMP_WORDS": words}
    env |= {"COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_ARGS": words}
    found = invoke(prog_name="holdfast", env={**env, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed(shell: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completing, "_LIMIT_S", 60)
    monkeypatch.setenv("HOLDFAST_REGISTRY", url)
    files = {path: path.stat().st_mtime_ns for path in Path(url).rglob("*")}
    for words, name in {
        "run show de": "demo",
        "show de": "demo",
        "show demo/tags/": "demo/tags/keeper",
        "diff demo demo/phase2/st": "demo/phase2/step00000020",
        "pull demo --only mo": "model",
        "run create --preset fine": "finetune",
        "preset fine": "finetune",
    }.items():
        assert name in " ".join(completed(f"holdfast {words}", shell)), words
    assert {path: path.stat().st_mtime_ns for path in Path(url).rglob("*")} == files


def test_completion_is_silent_quick_and_asks_no_bucket(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_REGISTRY", "nowhere")
    assert completed("holdfast show de") == []
    monkeypatch.setenv("HOLDFAST_REGISTRY", "s3://bucket/prefix")
    monkeypatch.setattr(completing.Address, "open", lambda _: pytest.fail("it was opened"))
    seen = SimpleNamespace(all=lambda: {"demo": None})
    monkeypatch.setattr(completing, "open_heads", lambda _: seen)
    assert completed("holdfast show de") == ["demo"]
    assert completed("holdfast show demo/") == ["demo/latest", "demo/best"]
    assert completed("holdfast pull demo --only ") == []
    monkeypatch.undo()
    monkeypatch.setenv("HOLDFAST_REGISTRY", url)
    monkeypatch.setattr(completing, "_LIMIT_S", 0.01)
    monkeypatch.setattr(completing, "_opened", lambda _: time.sleep(600))
    assert completed("holdfast show de") == []


def test_each_command_has_a_section_on_the_page_of_its_panel() -> None:
    """Each panel of `--help` has a page, which docs/cli.md links with each of its commands."""
    toc = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| \[(.+)\]\((cli/[\w-]+\.md)\) \| (.+) \|$", toc, re.M)
    assert [heading for heading, *_ in lines] == list(app._SECTIONS)
    assert set(" ".join(app._SECTIONS.values()).split()) == {*app._COMMANDS, *app._GROUPS}
    for heading, page, links in lines:
        names = {
            " ".join(words) for words, _ in walk() if words[0] in app._SECTIONS[heading].split()
        }
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert text.startswith(f"# {heading}\n")
        assert set(re.findall(r"^## (.+)$", text, re.M)) == names
        assert {(f"{page}#{name.replace(' ', '-')}", name) for name in names} == {
            (target, name) for name, target in re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", links)
        }


def test_help_and_version_are_commands_too(call: Call) -> None:
    assert call("help", "run", "ls").stdout == call("run", "ls", "--help").stdout
    assert call("help").stdout == call("--help").stdout
    assert call("version").stdout == call("--version").stdout


@pytest.mark.parametrize("command", ["gc", "repack", "prune demo --last 1"])
def test_a_dry_run_opens_the_registry_for_reading(
    command: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def opened(url: str, *, read_only: bool, **options: object) -> object:
        found.append(read_only)
        return open_registry(url, read_only=read_only)

    monkeypatch.setattr(opening, "open", opened)
    call(*command.split(), "--dry-run")
    call(*command.split())
    assert found == [True, False]


def test_no_help_is_cut_or_wider_than_a_terminal(call: Call) -> None:
    paths = [(), *((group,) for group in app._GROUPS), *(path for path, _ in walk())]
    helps = {path: call(*path, "--help").stdout for path in paths}
    for path, text in helps.items():
        assert max(map(len, text.splitlines())) <= 80, path
    commands = dict(walk())
    for path, text in helps.items():
        words = " ".join(text.split())
        below = {**app._COMMANDS} if not path else app._GROUPS.get(path[0], ("", {}))[1]
        for entry in below.values() if path not in commands else ():
            assert entry.partition(": ")[2] in words, path
        for one in commands[path].params if path in commands else ():
            assert one.hidden or " ".join((one.help or "").split()) in words, (path, one.name)
        if path in commands:
            assert " ".join((commands[path].help or "").split()) in words, path
    for about, _ in app._GROUPS.values():
        assert about in " ".join(helps[()].split())


#: Options that mean one thing in one command and another thing in another.
OF_THE_COMMAND = {"--metric", "--from", "--to", "--precision", "--into", "--best"}


@pytest.mark.parametrize(
    "command",
    [
        "push  demo --step 1",
        "pull demo --to ",
        "stream append demo x ",
    ],
)
def test_no_path_is_empty(command: str, call: Call) -> None:
    # `Path("")` is the current folder, which a script with an unset variable does not mean.
    assert "the path is empty" in call(*command.split(" "), status=2).stderr


def test_one_thing_has_one_name() -> None:
    metavars: dict[str, set[str | None]] = {}
    helps: dict[str, set[str]] = {}
    for _, command in walk():
        for one in command.params:
            for flag in one.opts if one.param_type_name == "option" and not one.hidden else ():
                metavars.setdefault(flag, set()).add(one.metavar)
                helps.setdefault(one.help, set()).add(flag)
    several = {flag for flag, found in metavars.items() if len(found) > 1}
    assert several <= OF_THE_COMMAND
    assert {about: flags - {"-r", "-h"} for about, flags in helps.items() if len(flags) > 1} == {
        about: {"--registry"} for about in helps if "--registry" in helps[about]
    } | {about: {"--help"} for about in helps if "--help" in helps[about]}


SYSTEMS = re.compile(r"adr.?004|andrea|cobre|hydra|thalia|burn|\.mpk", re.I)
#: By page: the words before which it names no single system.
PAGES = {
    "README.md": "## What it promises",
    "docs/README.md": "| look up | |",
    "docs/layouts.md": "## Layouts of single systems",
    "docs/presets.md": "## Presets of single systems",
}


@pytest.mark.parametrize("words", [(), *(words for words, _ in walk())], ids=" ".join)
def test_a_newcomer_meets_no_single_system(words: tuple[str, ...]) -> None:
    before, _, systems = invoke(*words, "--help").stdout.partition("of single systems: ")
    assert not SYSTEMS.search(before)
    assert bool(SYSTEMS.search(systems)) == bool(systems)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_is_for_everybody(page: str) -> None:
    before, end, _ = (ROOT / page).read_text(encoding="utf-8").partition(PAGES[page])
    assert end
    assert not SYSTEMS.search(before)
