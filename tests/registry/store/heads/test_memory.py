"""The files in which heads are kept: private, replaced whole, shared, bounded, never an error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import holdfast
from holdfast.backends import parse
from holdfast.registry.errors import InvalidInput
from holdfast.registry.store.address import Address
from holdfast.registry.store.heads import MEMORY, Heads, HeadsFile, folder, memory, open_heads
from holdfast.registry.values.digest import Digest
from tests.support.states import small_state

PLACE = parse("s3://bucket/registry")
ID = "0" * 32
LINK = Digest.of(b"a commit")


@pytest.fixture
def kept() -> Path:
    """The folder of the files; it is not there yet."""
    return Path(folder.state_folder())


def heads() -> Heads:
    found = open_heads(PLACE)
    found.check_registry(ID)
    return found


def note(found: Heads, run: str, commits: int = 1) -> None:
    found.note(run, commits, commits, LINK, commits - 1)
    found.write()


def only(kept: Path) -> Path:
    (file,) = kept.iterdir()
    return file


def test_only_their_user_may_read_them(kept):
    note(heads(), "night")
    assert only(kept).stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_mode & 0o777 == 0o700
    assert heads().seen("night").commits == 1


def test_what_two_processes_saw_is_kept_and_the_further_head_stays(kept):
    first, second = heads(), heads()
    note(first, "night", 5)
    note(first, "day", 1)
    note(second, "night", 3)
    note(second, "dusk", 2)
    found = heads().all()
    assert {run: head.commits for run, head in found.items()} == {"night": 5, "day": 1, "dusk": 2}


def test_what_was_forgotten_is_not_brought_back_by_who_only_read_it(kept):
    note(heads(), "night", 5)
    reader = heads()
    assert holdfast.trust("s3://bucket/registry")
    note(reader, "day", 1)
    assert list(heads().all()) == ["day"]


def test_their_number_is_bounded(kept, monkeypatch):
    monkeypatch.setattr(memory, "MAX_RUNS", 3)
    monkeypatch.setattr(folder, "MAX_FILES", 2)
    found = heads()
    for name in ("a", "b", "c", "a", "d"):
        note(found, name, found.seen(name).commits + 1 if found.seen(name) else 1)
    assert list(heads().all()) == ["c", "a", "d"]
    (kept / ".new-left").write_bytes(b"")
    os.utime(kept / ".new-left", (0, 0))
    os.utime(only_of(kept), (0, 0))
    for number in range(2):
        other = open_heads(parse(f"s3://bucket/{number}"))
        other.check_registry(ID)
        note(other, "night")
    assert len(list(kept.iterdir())) == 2
    assert heads().all() == {}


def only_of(kept: Path) -> Path:
    return next(path for path in kept.iterdir() if path.suffix == ".heads")


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(b"\xff" * 1000),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"commits":2', b'"commits":9')),
        lambda path: os.truncate(path, 2**40),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["empty", "cut", "garbage", "deep", "changed", "huge", "folder", "pipe"],
)
def test_a_file_that_is_none_counts_for_nothing(kept, harm, caplog):
    note(heads(), "night", 2)
    harm(only(kept))
    with caplog.at_level(logging.DEBUG, "holdfast"):
        found = heads()
    assert found.seen("night") is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    note(found, "night", 3)  # where it can be replaced it is, and nothing is raised where not


def test_links_are_not_followed(kept, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    note(heads(), "night", 2)
    only(kept).rename(elsewhere)
    name = Path(folder.place_name(PLACE))
    (kept / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert heads().seen("night") is None
    note(heads(), "day")
    assert elsewhere.read_bytes() == before
    assert not (kept / name).is_symlink()
    assert list(heads().all()) == ["day"]

    kept.rename(tmp_path / "moved")
    kept.symlink_to(tmp_path / "moved")
    before = {path: path.read_bytes() for path in (tmp_path / "moved").iterdir()}
    assert heads().all() == {}
    note(heads(), "dusk")
    assert before == {path: path.read_bytes() for path in (tmp_path / "moved").iterdir()}


def test_where_nothing_can_be_written_all_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        reg.create_run("night", seed=1).save(small_state(1), step=1)
    with holdfast.open(tmp_path / "reg") as reg:
        assert reg.run("night").latest() is not None


def test_a_state_folder_that_is_not_absolute_is_passed_over(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert folder.state_folder() == str(Path("~/.local/state/holdfast/heads").expanduser())


def test_without_a_home_nothing_is_remembered(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert open_heads(PLACE) is None
    assert not holdfast.trust("s3://bucket/registry")
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_turned_off(kept, tmp_path, monkeypatch):
    with monkeypatch.context() as off:
        off.setenv(MEMORY, "0")
        assert open_heads(PLACE) is None
        holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    with holdfast.open(tmp_path / "reg", remember=False) as reg:
        reg.create_run("night", seed=1)
    assert open_heads(PLACE, wanted=False) is None
    assert open_heads(parse("memory://x")) is None
    assert not kept.exists()
    monkeypatch.setenv(MEMORY, "maybe")
    with pytest.raises(InvalidInput, match=MEMORY):
        holdfast.open(tmp_path / "reg")


def test_places_of_one_name_are_kept_apart(monkeypatch):
    """A folder is one of this machine; a bucket one of the server that the environment names."""
    local = parse("/data/registry")
    names = {folder.place_name(local), folder.place_name(PLACE)}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(folder, "host_name", lambda: "another")
        names.add(folder.place_name(local))
        assert folder.place_name(PLACE) in names
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example.org")
    names.add(folder.place_name(PLACE))
    assert len(names) == 4
    assert folder.place_name(local) in names


def test_saving_writes_them_now_and_then_and_the_end_of_a_program_the_last(tmp_path, kept):
    """A training seldom closes its registry."""
    program = (
        "import holdfast, sys\n"
        "from holdfast.registry.store.heads import folder, memory\n"
        "written = []\n"
        "replace = folder.replace\n"
        "folder.replace = lambda *given: (written.append(1), replace(*given))\n"
        "run = holdfast.init(sys.argv[1], skip_race_probe=True).create_run('night', seed=1)\n"
        "for step in range(20): run.save({'x': step}, step=step)\n"
        "assert not written\n"
        "memory._WRITE_EVERY_S = 0\n"
        "for step in range(20, 23): run.save({'x': step}, step=step)\n"
        "assert len(written) == 3\n"
        "memory._WRITE_EVERY_S = 1000\n"
        "run.save({'x': 23}, step=23)\n"
        "assert len(written) == 3\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "reg")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = HeadsFile.decode(only(kept).read_bytes(), where="file")
    assert found.heads["night"].commits == 26  # the last one says that the program ended
    assert found.url == parse(tmp_path / "reg").url


def test_a_forked_child_does_not_wait_for_its_parents_lock(kept):
    found = heads()
    found.note("night", 1, 1, LINK, 0)
    with found._lock.here():
        child = os.fork()
        if child == 0:
            try:
                found.note("night", 2, 2, LINK, 1)
                found.write()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heads().seen("night").commits == 2


def test_trust_says_whether_anything_was_remembered(tmp_path, monkeypatch):
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        reg.create_run("night", seed=1)
    monkeypatch.chdir(tmp_path)
    assert holdfast.trust("reg")
    assert not holdfast.trust("reg")


def test_each_server_of_a_store_has_a_file_of_its_own(monkeypatch):
    at = parse("az://container/prefix")
    names = {folder.place_name(at._replace(server=server)) for server in ("", "a.net", "b.net")}
    assert len(names) == 3
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    assert folder.place_name(at._replace(server="a.net")) in names


def test_accounts_and_endpoints_have_heads_of_their_own():
    pytest.importorskip("adlfs")
    pytest.importorskip("s3fs")

    def name(url, transport=None, **options):
        address = Address(url, options or None, transport=transport)
        with closing(address.open()) as store:
            return folder.place_name(address.location(store))

    key = "bm8gc2VjcmV0"
    accounts = {name("az://container/x", account_name=one, account_key=key) for one in ("a", "b")}
    assert len(accounts) == 2
    assert name("az://container/x", account_name="a", account_key="b3RoZXI=") in accounts
    place = "s3://bucket/x"
    names = set()
    for server in ("http://a:1", "http://b:1"):
        ways = {
            name(place, endpoint_url=server),
            name(place, "s3fs", endpoint_url=server),
            name(place, "s3fs", client_kwargs={"endpoint_url": server}),
            name(f"{place}?endpoint_url={server}", "s3fs"),
            name(f"{place}?endpoint_url={server}"),
            folder.place_name(parse(f"{place}?endpoint_url={server}")),
        }
        assert len(ways) == 1
        names |= ways
    assert len(names) == 2
    # The names of earlier files are found.
    assert name(place) == folder.place_name(parse(place))
