"""Notes of a verification: trusted for one registry, one pass, and what was not written since."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

import pytest

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import InvalidInput
from holdfast.registry.upkeep import data_pass as pass_notes
from holdfast.registry.upkeep.data_pass import MAX_AGE_S, PassNotes

ID = "a" * 32
PACK = ObjectInfo(f"packs/aa/{'a' * 64}.0", 100, 1234.5)
OTHER = ObjectInfo(f"packs/bb/{'b' * 64}.0", 200, 1.25)


class _Full(FileIO):
    """A file on a disk that has room for 100 bytes."""

    def write(self, data) -> int:
        if self.tell() >= 100:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(data[: 100 - self.tell()])


class OnFullDisk(type(Path())):
    """A path on such a disk."""

    def open(self, mode="r", buffering=-1):
        return _Full(self, mode) if mode in ("xb", "r+b") else super().open(mode, buffering)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def noted(path: Path) -> Path:
    """A file that holds both packs."""
    with PassNotes(path, ID) as made:
        made.add(PACK)
        made.add(OTHER)
    return path


def test_what_was_added_is_held_by_the_next_one(noted: Path) -> None:
    with PassNotes(noted, ID) as again:
        assert again.holds(PACK)
        assert again.holds(OTHER)
        assert again.ignored is None


def test_on_a_full_disk_what_was_noted_before_still_counts(
    path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = noted.read_bytes()
    lines = whole.splitlines(keepends=True)
    for before in (b"", lines[0], whole):
        path.write_bytes(before)
        with monkeypatch.context() as patched:
            patched.setattr(pass_notes, "Path", OnFullDisk)
            with PassNotes(path, ID) as made:
                made.add(PACK)
                made.add(OTHER)
        assert path.read_bytes() == before
        with PassNotes(path, ID) as again:
            assert again.ignored is None
            again.add(PACK)


def test_nothing_is_held_before_it_is_added(path: Path) -> None:
    with PassNotes(path, ID) as made:
        assert not made.holds(PACK)
    with PassNotes(path, ID) as again:
        assert not again.holds(PACK)


@pytest.mark.parametrize(
    "changed",
    [
        ObjectInfo(PACK.key, 101, PACK.modified_s),
        ObjectInfo(PACK.key, 100, PACK.modified_s + 1e-3),
        ObjectInfo(PACK.key[:-1] + "1", 100, PACK.modified_s),
    ],
)
def test_what_was_written_since_is_not_held(noted: Path, changed: ObjectInfo) -> None:
    with PassNotes(noted, ID) as again:
        assert not again.holds(changed)


def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_is_whole(noted: Path) -> None:
    whole = noted.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last, last + 1, len(whole) - 5, len(whole) - 1):
        noted.write_bytes(whole[:cut])
        with PassNotes(noted, ID) as again:
            assert again.holds(PACK)
            assert not again.holds(OTHER)
            again.add(OTHER)
        assert noted.read_bytes() == whole


def test_every_flipped_bit_is_refused_and_the_file_left_alone(noted: Path) -> None:
    whole = noted.read_bytes()
    for bit in range(0, 8 * (len(whole) - 1), 23):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        noted.write_bytes(data)
        with pytest.raises(InvalidInput) as caught:
            PassNotes(noted, ID)
        assert str(noted) in str(caught.value)
        assert noted.read_bytes() == data


def test_a_line_of_another_pass_proves_nothing(noted: Path, tmp_path: Path) -> None:
    with PassNotes(tmp_path / "other", ID) as other:
        other.add(ObjectInfo(f"packs/cc/{'c' * 64}.0", 3, 3.0))
    line = (tmp_path / "other").read_bytes().split(b"\n")[1]
    noted.write_bytes(noted.read_bytes() + line + b"\n")
    with pytest.raises(InvalidInput, match="does not match its digest"):
        PassNotes(noted, ID)


@pytest.mark.parametrize("data", [b"x", b"\n", b"{}\n", b"my thesis\n\n", b"\0" * 100])
def test_a_file_of_another_kind_is_refused_and_left_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="not notes of a verification"):
        PassNotes(path, ID)
    assert path.read_bytes() == data


def test_notes_on_another_registry_are_refused_and_left_alone(noted: Path) -> None:
    before = noted.read_bytes()
    with pytest.raises(InvalidInput, match=f"expected {'b' * 32}; found {ID}"):
        PassNotes(noted, "b" * 32)
    assert noted.read_bytes() == before


@pytest.mark.parametrize("age_s", [MAX_AGE_S + 1, -2 * 86_400])
def test_a_pass_of_long_ago_counts_for_nothing(
    noted: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    now = pass_notes.time.time()
    monkeypatch.setattr(pass_notes.time, "time", lambda: now + age_s)
    with PassNotes(noted, ID) as again:
        assert again.ignored is not None
        assert not again.holds(PACK)
        again.add(OTHER)
    with PassNotes(noted, ID) as third:
        assert third.ignored is None
        assert third.holds(OTHER)
        assert not third.holds(PACK)


def test_a_pass_of_four_weeks_counts(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = pass_notes.time.time()
    monkeypatch.setattr(pass_notes.time, "time", lambda: now + MAX_AGE_S - 60)
    with PassNotes(noted, ID) as again:
        assert again.holds(PACK)


def test_an_empty_file_is_taken(path: Path) -> None:
    path.touch()
    with PassNotes(path, ID) as made:
        made.add(PACK)
    with PassNotes(path, ID) as again:
        assert again.holds(PACK)


def test_a_finished_pass_leaves_no_file(noted: Path) -> None:
    with PassNotes(noted, ID) as again:
        again.finish()
    assert not noted.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "absent" / "notes"):
        with pytest.raises(InvalidInput, match="cannot keep notes"):
            PassNotes(where, ID)
