"""`verify` and `repair` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.cli.calling import Call


@pytest.fixture
def mirror(url: str, tmp_path: Path) -> str:
    place = str(tmp_path / "mirror")
    holdfast.init(place, skip_race_probe=True).close()
    holdfast.sync(url, place)
    return place


def packs(url: str) -> list[Path]:
    return sorted(path for path in Path(url, "packs").rglob("*") if path.is_file())


def harm(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)


def test_verify_says_how_much_it_read(call: Call, url: str, tmp_path: Path) -> None:
    assert "--deep hashes every byte" in call("verify").stdout
    assert "hashed" in call("verify", "--deep").stdout
    assert "not read again" not in call("verify", "--since-last").stdout
    assert "1 run did not change since the last" in call("verify", "--since-last").stdout
    total = len(packs(url))
    said = call("verify", "--sample", "1%", "--resume", tmp_path / "notes").stdout
    assert f"Read 1 of {total} packs: " in said
    said = call("verify", "--sample", "0.01", "--resume", tmp_path / "notes").stdout
    assert "1 pack, " in said
    assert "read before in this pass" in said
    assert not (tmp_path / "notes").exists()


@pytest.mark.parametrize("share", ["0", "5", "101%", "-1%", "x", "nan", ""])
def test_verify_refuses_what_is_no_share(call: Call, share: str) -> None:
    assert "is not a share" in call("verify", "--sample", share, status=2).stderr


def test_verify_refuses_a_file_of_another_kind(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("my thesis\n")
    result = call("verify", "--resume", tmp_path / "thesis", status=3)
    assert "not notes of a verification" in result.stderr
    assert (tmp_path / "thesis").read_text() == "my thesis\n"


def test_verify_advises_a_repair(call: Call, url: str) -> None:
    harm(packs(url)[0])
    said = call("verify", "--deep", status=6).stdout
    assert "affects demo/" in said
    assert "holdfast repair --from" in said


def test_repair_mends(call: Call, url: str, mirror: str) -> None:
    key = packs(url)[0]
    whole = key.read_bytes()
    harm(key)
    dry = call("repair", "--from", mirror, "--dry-run").stdout
    assert key.read_bytes() != whole
    assert dry.startswith("would be restored: packs/")
    assert "1 would be mended" in dry
    said = call("repair", "--from", mirror).stdout
    assert key.read_bytes() == whole
    assert said.startswith("restored: packs/")
    assert "  mends demo/" in said
    assert "ok: 1 mended" in said
    assert call("repair", "--from", mirror).stdout == "ok: nothing to mend\n"
    call("verify", "--deep")


def test_repair_without_deep_looks_at_names_and_sizes(call: Call, url: str, mirror: str) -> None:
    first, second = packs(url)[:2]
    harm(first)
    second.unlink()
    assert "ok: 1 mended" in call("repair", "--from", mirror, "--no-deep").stdout
    assert second.exists()
    call("verify")
    call("verify", "--deep", status=6)


def test_repair_tells_what_is_left(call: Call, url: str, mirror: str) -> None:
    harm(packs(url)[0])
    harm(packs(mirror)[0])
    said = call("repair", "--from", mirror, status=6).stdout
    assert said.startswith("left: packs/")
    assert "  affects demo/" in said
    assert f"  not mended: file://{mirror}: packs/" in said
    assert "1 left: 0 mended" in said


def test_repair_refuses_its_own_place_and_no_place(call: Call, url: str, tmp_path: Path) -> None:
    assert "its own mirror" in call("repair", "--from", url, status=3).stderr
    assert "not a registry" in call("repair", "--from", tmp_path, status=4).stderr
    assert "--from" in call("repair", status=2).stderr


def test_repair_as_json(call_json: Any, url: str, mirror: str) -> None:
    first, second = packs(url)[:2]
    harm(first)
    harm(second)
    harm(Path(mirror) / second.relative_to(url))
    report = call_json("repair", "--from", mirror, status=6)
    assert set(report) == {"ok", "dry_run", "found", "mended", "left", "bytes_written"}
    assert (report["ok"], report["dry_run"], report["found"]["ok"]) == (False, False, False)
    assert len(report["found"]["findings"]) == 2
    (mended,), (left,) = report["mended"], report["left"]
    assert set(mended) == {"where", "how", "source", "affects", "size_bytes"}
    assert mended["where"] == str(first.relative_to(url))
    assert report["bytes_written"] == mended["size_bytes"] == first.stat().st_size
    assert set(left) == {"where", "message", "reason", "affects", "advice"}
    assert left["where"] == str(second.relative_to(url))


def test_a_log_that_went_back_is_refused_until_it_is_trusted(
    call: Call, call_json: Any, url: str, tmp_path: Path
) -> None:
    heads = tmp_path / "audit.heads"
    call("verify", "--heads", heads, status=3)
    call("verify", "--write-heads", heads)
    call("verify", "--heads", heads, "--write-heads", heads)
    before = heads.read_bytes()
    max(Path(url, "runs/demo/log").iterdir()).unlink()
    told = call("show", "demo", status=6).stderr
    assert "shorter than this machine has seen it" in told
    assert f"holdfast trust file://{url}" in told
    for listing in (["run", "ls"], ["ls"], ["du"]):
        told = call(*listing, status=6).stderr
        assert "damaged: demo: " in told
        assert f"holdfast trust file://{url}" in told
    told = call("verify", "--heads", heads, "--write-heads", heads, status=6).stdout
    assert "this machine has seen 4: its end is gone" in told
    assert f"{heads} has seen 4: its end is gone" in told
    assert heads.read_bytes() == before
    assert (
        call("pull", "demo", "--to", tmp_path / "x.pt", status=6).stderr
        == call("show", "demo", status=6).stderr
    )
    assert call_json("trust") == {"url": f"file://{url}", "forgotten": True}
    assert "no heads were remembered" in call("trust", url).stdout
    call("show", "demo")
    call("verify", "--heads", heads, status=6)


def test_a_push_writes_again_what_a_check_found_damaged(
    call: Call, url: str, tmp_path: Path
) -> None:
    state = tmp_path / "state.bin"
    state.write_bytes(bytes(range(256)) * 1000)
    before = set(Path(url, "packs").rglob("*"))
    call("push", state, "raw", "--create", "--step", 1)
    (pack,) = (one for one in set(Path(url, "packs").rglob("*")) - before if one.is_file())
    pack.chmod(0o644)
    pack.write_bytes(b"?" + pack.read_bytes()[1:])
    call("pull", "raw", "--to", tmp_path / "out", status=6)
    call("push", state, "raw", "--step", 1)  # it knows of no damage yet
    call("pull", "raw", "--to", tmp_path / "out", status=6)
    call("verify", "--deep", status=6)
    assert "damaged" in call("ls", "raw").stdout
    call("push", state, "raw", "--step", 1)
    call("pull", "raw", "--to", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == state.read_bytes()
    call("verify", "--deep")
