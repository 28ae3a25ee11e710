"""Semantic versions (semver.org, 2.0.0): they name and order released models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import total_ordering

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

#: Limits in characters. The version of a release is a name in a ref, so its limit is lower.
MAX_LENGTH = 256
MAX_RELEASE_LENGTH = 64
_NUMBER = r"(0|[1-9][0-9]*)"
_PRE = r"(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_BUILD = r"[0-9A-Za-z-]+"
_VERSION = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_PRE}(?:\.{_PRE})*))?(?:\+({_BUILD}(?:\.{_BUILD})*))?"
)
_EXPECTED = "MAJOR.MINOR.PATCH, such as 1.4.0 or 2.0.0-rc.1"


@total_ordering
@dataclass(frozen=True, slots=True)
class SemVer:
    """A semantic version, ordered by precedence (semver.org, rule 11); `str` returns its text.

    Comparison ignores build metadata: `1.0.0+a` equals `1.0.0+b`.
    """

    major: int  # rises with incompatible changes; from 0
    minor: int  # rises with compatible additions; from 0
    patch: int  # rises with compatible corrections; from 0
    #: The part after `-`, such as `rc.1`, or empty. A prerelease is ordered before its release.
    prerelease: str = ""
    build: str = field(default="", compare=False)  # the part after `+`, or empty

    def __post_init__(self) -> None:
        text = str(self)
        match = _VERSION.fullmatch(text) if len(text) <= MAX_LENGTH else None
        # The parts must be the same again: a `+` within `prerelease` would give another version.
        if match is None or _parts(match) != (
            *(self.major, self.minor, self.patch),
            *(self.prerelease, self.build),
        ):
            raise _not_a_version(text)

    @classmethod
    def parse(cls, text: str) -> SemVer:
        """Parse a version."""
        match = None
        if isinstance(text, str) and len(text) <= MAX_LENGTH:
            match = _VERSION.fullmatch(text)
        if match is None:
            raise _not_a_version(text)
        return cls(*_parts(match))

    def __str__(self) -> str:
        core = f"{self.major}.{self.minor}.{self.patch}"
        pre = f"-{self.prerelease}" if self.prerelease else ""
        return core + pre + (f"+{self.build}" if self.build else "")

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, SemVer):
            return NotImplemented
        return self._precedence() < other._precedence()

    def _precedence(self) -> tuple[object, ...]:
        # Numbers are lower than words, and a list is lower than a longer one that begins with it.
        identifiers = tuple(
            (0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in self.prerelease.split(".")
        )
        return (self.major, self.minor, self.patch, not self.prerelease, identifiers)


def release_version(text: str) -> SemVer:
    """Parse the version of a release."""
    version = SemVer.parse(text)
    if version.build:
        raise InvalidInput(
            "the name of a release has no build metadata",
            where=text,
            expected=text.partition("+")[0],
            hint="Keep the build in the model card.",
        )
    if len(text) > MAX_RELEASE_LENGTH:
        raise InvalidInput(
            "the name of a release is too long",
            where=text,
            expected=f"at most {MAX_RELEASE_LENGTH} characters",
            found=len(text),
        )
    return version


def _parts(match: re.Match[str]) -> tuple[int, int, int, str, str]:
    major, minor, patch, prerelease, build = match.groups(default="")
    return int(major), int(minor), int(patch), prerelease, build


def _not_a_version(text: object) -> InvalidInput:
    like = isinstance(text, str) and text[:1] in ("v", "V")
    return InvalidInput(
        "not a semantic version",
        where=quoted(text)[:MAX_LENGTH],
        expected=_EXPECTED,
        hint=f"Leave out the {text[0]!r}." if like else None,  # type: ignore[index]
    )
