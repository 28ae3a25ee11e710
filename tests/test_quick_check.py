"""The quick check finds the tests that a change reaches, the nearest first."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "scripts" / "quick.py"
_spec = importlib.util.spec_from_file_location("quick", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
quick = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quick)

#: A package of three layers and its tests. One of them takes what it tries from a fixture.
FILES = {
    "quickshop/__init__.py": "",
    "quickshop/price.py": "",
    "quickshop/till.py": "from quickshop import price\n",
    "quickshop/words/hello.txt": "hello",
    "quicktests/__init__.py": "",
    "quicktests/conftest.py": "",
    "quicktests/quickshop/__init__.py": "",
    "quicktests/quickshop/buyers.py": "from quickshop import price\n",
    "quicktests/quickshop/test_other.py": "import quickshop.price\n",
    "quicktests/quickshop/test_price.py": "from quicktests.quickshop import buyers\n",
    "quicktests/quickshop/test_till.py": "from quickshop import till\n",
    "quicktests/served/__init__.py": "",
    "quicktests/served/conftest.py": "from quickshop import till\n",
    "quicktests/served/test_fixture.py": "",
    "quicktests/test_guide.py": "# reads guide.md\n",
    "guide.md": "",
    "odd.cfg": "",
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def reach(shop: Path) -> Callable[..., list[str]]:
    found = quick.Reach(shop, ("quickshop",), "quicktests")
    return lambda *changed: [str(test) for test in found.of(map(Path, changed))]


OTHER, PRICE, TILL = (f"quicktests/quickshop/test_{name}.py" for name in ("other", "price", "till"))
FIXTURE = "quicktests/served/test_fixture.py"


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        # Its own tests first, then who imports it, then who imports that, then who is served by it.
        ("quickshop/price.py", [PRICE, OTHER, TILL, FIXTURE]),
        ("quickshop/till.py", [TILL, FIXTURE]),
        ("quicktests/quickshop/buyers.py", [PRICE]),
        ("quicktests/served/conftest.py", [FIXTURE]),
        ("quicktests/quickshop/test_other.py", [OTHER]),
        ("guide.md", ["quicktests/test_guide.py"]),
        ("quickshop/words/hello.txt", []),
        ("quicktests/served/sample.bin", [FIXTURE]),
        ("gone/away.py", []),
    ],
)
def test_reach(reach: Callable[..., list[str]], changed: str, reached: list[str]) -> None:
    assert reach(changed) == reached


def test_of_several_changes_the_nearest_counts(reach: Callable[..., list[str]]) -> None:
    assert reach("quickshop/price.py", FIXTURE) == [FIXTURE, PRICE, OTHER, TILL]


def test_what_is_committed_changed_and_new_since_main(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = {
            f"GIT_{one}_{of}": "a@b" for one in ("AUTHOR", "COMMITTER") for of in ("NAME", "EMAIL")
        }
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **who})

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"{len(list(tmp_path.iterdir()))}")

    assert quick.changed_files(tmp_path) == []  # no repository at all
    git("init", "-q", "-b", "main")
    write("kept", "committed", "changed", ".gitignore")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("checkout", "-q", "-b", "branch")
    write("committed")
    git("commit", "-q", "-a", "-m", "two")
    write("changed", "new", "ignored")
    assert sorted(map(str, quick.changed_files(tmp_path))) == ["changed", "committed", "new"]


def test_the_nearest_come_first_and_none_begins_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shop = Path("shop")
    (shop / "till").mkdir(parents=True)
    (shop / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef bell():\n    return 1\n")
    files = [shop / "test_bell.py", Path("test_street.py"), shop / "till" / "test_till.py"]
    for file, fixture in zip(files, ("bell", "", "bell"), strict=True):
        file.write_text(f"def test_{file.stem}({fixture}):\n    print('{file.stem}', end=' ')\n")
    alone = ("-s", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}")
    assert quick.try_in_time(files, 60, *alone) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"test_\w+", printed) == ["test_bell", "test_street", "test_till"]
    assert quick.try_in_time(files, -1, *alone) == 0
    assert "3 tests farther" in capsys.readouterr().out


def test_the_real_tree_can_be_read() -> None:
    reached = quick.Reach(quick.ROOT).of([Path("backends/local/backend.py")])
    assert reached[0] == Path("tests/backends/test_local.py")
    assert Path("tests/backends/test_contract.py") in reached
