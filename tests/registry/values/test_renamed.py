"""Old names of attributes, methods and arguments work, and the warning says the new name."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest

from holdfast.registry.values import InvalidRecord, Record, Renamed, renamed_arguments

ROOT = Path(__file__).parents[3]


class Tags:
    def set(self, name: str) -> str:
        return f"set {name}"


class Double:
    """A public class some of whose names were renamed."""

    status = "running"
    tag = Renamed("tags.set", ends="0.3")
    state = Renamed("status", ends="0.3")
    read = Renamed("parse", ends="0.3")
    first_tags = Renamed("tags", ends="0.3")

    def __init__(self) -> None:
        self.tags = Tags()

    @classmethod
    def parse(cls, text: str) -> tuple[type, str]:
        return cls, text

    @renamed_arguments({"stride": "every", "codec": "compression"}, ends="0.3")
    def save(self, value: int, *, every: int = 1, compression: str = "raw") -> tuple[int, int, str]:
        """Save."""
        return value, every, compression


@renamed_arguments({"keep_last": "last"}, ends="0.3")
@dataclass(frozen=True)
class Options:
    last: int = 1


@renamed_arguments({"keep_last": "last"}, ends="0.3")
class Rule(Record):
    """A value that users make, and that is on the store."""

    last: int = 1
    keep_last = Renamed("last", ends="0.3")


@renamed_arguments({"to": "mirror"}, ends="0.3")
def sync(source: str, *, mirror: str = "") -> str:
    return source + mirror


def set_state(double: Double) -> str:
    double.state = "completed"
    return double.status


@pytest.mark.parametrize(
    ("use", "result", "says"),
    [
        (lambda it: it.tag("a"), "set a", "Double.tag is now Double.tags.set"),
        (lambda it: it.state, "running", "Double.state is now Double.status"),
        (set_state, "completed", "Double.state is now Double.status"),
        (lambda it: it.first_tags.set("b"), "set b", "Double.first_tags is now Double.tags"),
        (lambda _: Double.read("x"), (Double, "x"), "Double.read is now Double.parse"),
        (
            lambda it: it.save(5, stride=2),
            (5, 2, "raw"),
            "Double.save(stride=) is now Double.save(every=)",
        ),
        (lambda _: Options(keep_last=3), Options(3), "Options(keep_last=) is now Options(last=)"),
        (lambda _: Rule(keep_last=3), Rule(last=3), "Rule(keep_last=) is now Rule(last=)"),
        (lambda _: Rule(last=3).keep_last, 3, "Rule.keep_last is now Rule.last"),
        (lambda _: sync("a", to="b"), "ab", "sync(to=) is now sync(mirror=)"),
    ],
)
def test_an_old_name_does_what_the_new_one_does_and_says_it(
    use: FunctionType, result: object, says: str
) -> None:
    text = f"{says}; the old name ends in version 0.3"
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(text)}$") as warned:
        assert use(Double()) == result
    assert len(warned) == 1
    at = {line for _, _, line in use.__code__.co_lines()}  # the user's line, not one of ours
    assert (warned[0].filename, warned[0].lineno in at) == (__file__, True)


def test_an_old_name_of_a_module_works_and_says_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "public.py").write_text(
        "from holdfast.registry.values.first_use import at_first_use\n"
        "_RENAMED = {'find': ('search', '0.3')}\n"
        "__getattr__ = at_first_use(__name__, _RENAMED)\n"
        "def search(): return 'found'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    public = importlib.import_module("public")
    text = r"^public\.find is now public\.search; the old name ends in version 0\.3$"
    with pytest.warns(DeprecationWarning, match=text) as warned:
        assert public.find() == "found"
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = public.other


def test_new_names_are_silent_and_show_no_old_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        double = Double()
        assert double.save(1, every=2, compression="zstd") == (1, 2, "zstd")
        assert (double.tags.set("a"), double.status) == ("set a", "running")
        assert (Options(last=2), sync("a", mirror="b")) == (Options(2), "ab")
    assert list(inspect.signature(Double.save).parameters) == [
        *("self", "value", "every", "compression")
    ]
    assert (Double.save.__doc__, Double.save.__name__) == ("Save.", "save")
    assert list(inspect.signature(Options).parameters) == ["last"]
    assert isinstance(Options(1), Options)


def test_an_argument_by_both_names_is_refused() -> None:
    with pytest.raises(TypeError, match=r"save\(stride=\) and Double.save\(every=\) are one"):
        Double().save(1, every=2, stride=3)  # type: ignore[call-arg]


def test_a_record_on_the_store_has_no_old_name() -> None:
    assert Rule.of({"last": 3}) == Rule(last=3)
    with pytest.raises(InvalidRecord, match="keep_last: is unknown"):
        Rule.of({"keep_last": 3})


def test_no_old_name_outlives_its_version() -> None:
    """The release of the version in which a name ends has to remove it."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = numbers(config["project"]["version"])
    for folder in ("registry", "backends", "src/holdfast"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            ends = re.findall(r'\bends="([\d.]+)"', text)
            for table in re.findall(r"^ *_RENAMED\b[^\n]* = \{.*?\}$", text, re.M | re.S):
                ends += re.findall(r'"([\d.]+)"\)', table)
            assert [one for one in ends if numbers(one) <= version] == [], file


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
