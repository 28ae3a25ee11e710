"""Signatures say who vouches for which commits. Nobody without the key can deceive its readers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import holdfast
from holdfast import Retention, sync
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.errors import (
    Conflict,
    Frozen,
    IntegrityError,
    InvalidInput,
    NotFound,
    StoreUnavailable,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import CommitSigner, SigningKey, sign_commit
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.upkeep import sealing, signature_check
from holdfast.registry.values import Digest
from tests.support.faults import Hooked
from tests.support.keys import write_key
from tests.support.states import save_small, small_state
from tests.support.stores import contents, new_backend


@pytest.fixture(autouse=True)
def _settles_at_once(monkeypatch):
    monkeypatch.setattr(signature_check.time, "sleep", lambda seconds: None)


@pytest.fixture
def key(tmp_path) -> str:
    return write_key(tmp_path, "ana")


@pytest.fixture
def trusted(key, tmp_path) -> Path:
    return tmp_path / "trusted-ana"


def said(reg, trusted, **options) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, int]]]:
    """Return the findings of a verification, and who vouches for how many commits of which run."""
    report = reg.verify(signed=trusted, **options)
    found = [(one.severity, one.where, one.message) for one in report.findings]
    return found, [(one.run_id, one.name, one.commits) for one in report.vouched]


def unsigned(first: int, last: int, run: str = "run") -> tuple[str, str, str]:
    which = f"commit {last} is" if first == last else f"commits {first} to {last} are"
    return ("error", run, f"{which} not signed by a trusted key")


def slots(backend, run: str = "run") -> list[str]:
    return sorted(contents(backend, f"runs/{run}/log/"))


def signed(backend) -> list[str]:
    return sorted(contents(backend, "signatures/"))


def signing(backend, key: str):
    """Open a registry that signs each of its commits."""
    reg = open_on(backend)
    reg.handle.store.signer = CommitSigner(key)
    return reg


def test_one_signature_vouches_for_all_before_it_and_each_key_for_its_own(
    reg, run, key, trusted, tmp_path
):
    save_small(run, 1, 2)
    other = write_key(tmp_path, "bo")
    assert said(reg, trusted) == ([unsigned(0, 2)], [])
    assert [(one.run_id, one.commits, one.is_new) for one in reg.sign(key)] == [("run", 3, True)]
    assert reg.sign(key, ["run"])[0].is_new is False
    assert said(reg, trusted) == ([], [("run", "ana", 3)])
    save_small(run, 3)
    assert said(reg, trusted) == ([unsigned(3, 3)], [("run", "ana", 3)])
    reg.sign(other)
    # A key that the reader does not trust counts for nothing, whoever else trusts it.
    assert said(reg, trusted) == ([unsigned(3, 3)], [("run", "ana", 3)])
    both = [trusted / "ana.pem", tmp_path / "trusted-bo"]
    assert said(reg, both) == ([], [("run", "bo", 4), ("run", "ana", 3)])
    assert [one.severity for one in reg.verify().findings] == []  # without keys nothing is asked


def test_a_handle_signs_each_commit_that_it_makes_and_no_other_line(backend, key, trusted):
    with signing(backend, key) as reg:
        run = reg.create_run("run", seed=1)
        save_small(run, 1, 2, 3)
        run.pins.tags.set("best", run.latest())
        assert len(signed(backend)) == len(slots(backend)) == 5
        run.retention.prune(Retention(last=1))
        reg.upgrade()
        reg.gc(grace_s=0)
        assert len(slots(backend)) > len(signed(backend)) == 6
        assert said(reg, trusted) == ([], [("run", "ana", 6)])


def test_a_wrong_key_stops_the_first_write(backend, tmp_path):
    with signing(backend, str(tmp_path / "none")) as reg:
        before = contents(backend)
        with pytest.raises(InvalidInput, match="the key cannot be read"):
            reg.create_run("run", seed=1)
        assert contents(backend) == before


def test_a_commit_stands_if_its_signature_fails_and_the_next_one_covers_it(key, trusted, caplog):
    backend, is_away = new_backend(), True

    def fail(method: str, name: str) -> None:
        if is_away and method == "put_if_absent" and name.startswith("signatures/"):
            raise StoreUnavailable("away", where=name)

    hooked = Hooked(backend)
    hooked.before = fail
    with signing(hooked, key) as reg:
        run = reg.create_run("run", seed=1)
        save_small(run, 1)
        (first, second) = caplog.messages
        assert first.startswith("run: commit 0 is not signed: signatures/run/")
        assert second.startswith("run: commit 1 is not signed: signatures/run/")
        assert (len(slots(backend)), signed(backend)) == (2, [])
        is_away = False
        save_small(run, 2)
        assert len(signed(backend)) == 1
        assert said(reg, trusted) == ([], [("run", "ana", 3)])


@pytest.fixture
def attacked(key, trusted, tmp_path):
    """A store whose run of 4 commits was signed as it grew, and an auditor's heads of it."""
    backend = new_backend()
    with signing(backend, key) as reg:
        save_small(reg.create_run("run", seed=1), 1, 2, 3)
        assert reg.verify(signed=trusted, write_heads=tmp_path / "heads").ok
    return backend


def after(backend: MemoryBackend, trusted, **options):
    """Return what a machine says that has never seen the registry."""
    with open_on(backend) as reg:
        return said(reg, trusted, **options)


def fork(backend, slot: int, key: str | None = None) -> None:
    """Cut the log at a slot, and let another training go on from there."""
    for one in (*slots(backend)[slot:], *contents(backend, "runs/run/snapshots/")):
        backend.delete(one)
    with open_on(backend) as reg:
        if key is not None:
            reg.handle.store.signer = CommitSigner(key)
        run = reg.run("run")
        run.restore()
        for step in range(7, 11):
            run.save(small_state(step), step=step)


def test_a_log_that_was_cut_is_found_by_its_signatures_and_then_by_heads(
    attacked, trusted, tmp_path
):
    attacked.delete(slots(attacked)[-1])
    gone = ("error", "run", "ana has signed commit 3, and the log has 3 commits: its end is gone")
    assert after(attacked, trusted) == ([gone], [("run", "ana", 3)])
    attacked.delete(signed(attacked)[-1])
    assert after(attacked, trusted) == ([], [("run", "ana", 3)])  # signatures alone do not tell
    heads = tmp_path / "heads"
    seen = f"the log has 3 commits; {heads} has seen 4: its end is gone"
    assert after(attacked, trusted, heads=heads)[0] == [("error", "run", seen)]


def test_a_forked_log_is_found_down_to_the_commit_where_it_leaves(attacked, trusted):
    fork(attacked, 2)
    other = ("error", "run", "commit 3 is not the one that ana has signed")
    assert after(attacked, trusted) == ([other, unsigned(2, 5)], [("run", "ana", 2)])


def test_a_fork_that_a_stranger_signs_is_not_signed(attacked, trusted, tmp_path):
    fork(attacked, 2, write_key(tmp_path, "eve"))
    for name in signed(attacked):  # of those of the key that is trusted only old ones stay
        if int(name.split("/")[2].partition(".")[0]) in (2, 3) and not _is_by(
            name, "eve", tmp_path
        ):
            attacked.delete(name)
    assert after(attacked, trusted) == ([unsigned(2, 5)], [("run", "ana", 2)])


def _is_by(name: str, who: str, folder: Path) -> bool:
    return name.endswith(SigningKey.load(str(folder / f"{who}.key")).public.id.hex())


@pytest.mark.sometimes("a key has signed another history")
def test_a_fork_that_a_trusted_key_signs_is_found_by_heads(
    attacked, key, trusted, tmp_path, caplog
):
    fork(attacked, 2, key)
    # The key has signed commits 2 and 3 of the first history already: it says so.
    assert sum("another file has the name" in one for one in caplog.messages) == 2
    assert after(attacked, trusted) == ([], [("run", "ana", 6)])
    heads = tmp_path / "heads"
    told = ("error", "run", f"commit 3 is not the one that {heads} has seen")
    assert after(attacked, trusted, heads=heads)[0] == [told]


def test_a_run_that_is_gone_is_named_by_its_signatures(attacked, trusted):
    for one in contents(attacked, "runs/"):
        attacked.delete(one)
    attacked.put(f"signatures/run/{9:020}.{'e' * 64}", b"of a stranger")
    gone = ("error", "run", "the run is gone; ana has signed commit 3 of it")
    assert after(attacked, trusted) == ([gone], [])


@pytest.mark.parametrize("how", ["flipped", "renamed", "moved on", "not by the key"])
def test_a_signature_that_proves_nothing_is_a_note_and_the_others_count(
    attacked, trusted, tmp_path, how
):
    name = signed(attacked)[-1]
    data = attacked.get(name)
    if how == "flipped":
        attacked.put(name, data.replace(b'"n":3', b'"n":4'))
        message = "damaged file: the closing digest does not match its bytes"
    elif how == "renamed":  # an older one under the name of the newest
        attacked.put(name, attacked.get(signed(attacked)[-2]))
        message = "a signature under another name"
    elif how == "moved on":  # to a commit that the attacker has made
        (line,) = split_lines(data, where=name)
        attacked.put(name, join_lines([line.replace(b'"digest":"', b'"digest":"0', 1)]))
        message = "not a signature of this format"
    else:  # by another key, under the id of the one that is trusted
        stranger = SigningKey.load(write_key(tmp_path, "eve"))
        (line,) = split_lines(data, where=name)
        made = stranger.sign(line).hex().encode()
        head, _, _ = line.partition(b'"signature":"')
        attacked.put(name, join_lines([head + b'"signature":"' + made + b'"}']))
        message = "not signed by ana"
    (missing, unread), vouched = after(attacked, trusted)
    assert (missing, vouched) == (unsigned(3, 3), [("run", "ana", 3)])
    assert unread[:2] == ("note", name)
    assert message in unread[2]


def test_no_two_histories_are_signed_and_no_log_that_went_back_or_is_damaged(
    attacked, key, tmp_path
):
    fork(attacked, 3)
    for one in slots(attacked)[4:]:
        attacked.delete(one)
    for one in contents(attacked, "runs/run/snapshots/"):
        attacked.delete(one)
    with open_on(attacked) as reg, pytest.raises(Conflict, match="has signed another history"):
        reg.sign(key)
    attacked.put(slots(attacked)[-1], b"no slot")
    with open_on(attacked) as reg, pytest.raises(IntegrityError, match="damaged is not signed"):
        reg.sign(key)


def test_a_log_that_this_machine_has_seen_further_is_not_signed(tmp_path, key):
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        save_small(reg.create_run("run", seed=1), 1, 2)
    log = tmp_path / "reg" / "runs" / "run" / "log"
    max(log.iterdir()).unlink()
    with holdfast.open(tmp_path / "reg") as reg:
        with pytest.raises(IntegrityError, match="its end is gone"):
            reg.sign(key)
        with pytest.raises(NotFound, match="no such run"):
            reg.sign(key, ["none"])
    assert not (tmp_path / "reg" / "signatures").exists()


@pytest.mark.sometimes("a signature comes while its commit is checked")
def test_a_commit_whose_signature_is_on_its_way_is_no_finding(backend, key, trusted, monkeypatch):
    with signing(backend, key) as reg:
        run = reg.create_run("run", seed=1)
        save_small(run, 1)
        held = backend.get(signed(backend)[-1])
        backend.delete(name := signed(backend)[-1])

        def meanwhile(seconds: float) -> None:
            backend.put(name, held)
            save_small(run, 2)  # the log goes on, too

        monkeypatch.setattr(signature_check.time, "sleep", meanwhile)
        assert said(reg, trusted) == ([], [("run", "ana", 2)])


def test_signatures_that_may_be_on_their_way_are_awaited_once_for_all_runs(
    backend, key, trusted, monkeypatch
):
    with signing(backend, key) as reg:
        for run in ("a", "b", "c"):
            reg.create_run(run, seed=1)
        late = signed(backend)
        held = backend.get(late[1])
        for name in late:
            backend.delete(name)
        waits = []

        def meanwhile(seconds: float) -> None:
            waits.append(seconds)
            backend.put(late[1], held)

        monkeypatch.setattr(signature_check.time, "sleep", meanwhile)
        assert said(reg, trusted) == ([unsigned(0, 0, "a"), unsigned(0, 0, "c")], [("b", "ana", 1)])
        assert len(waits) == 1


def test_signatures_go_to_a_mirror_with_the_commits_and_nobody_signs_for_others(
    reg, run, backend, key, trusted, caplog, tmp_path
):
    save_small(run, 1, 2)
    reg.sign(key)
    mirror = new_backend()
    with signing(mirror, write_key(tmp_path, "mirror")) as there:
        sync(reg, there)
        assert contents(mirror, "signatures/") == contents(backend, "signatures/")
        assert said(there, trusted) == ([], [("run", "ana", 3)])
        # A signature that comes later, of a run that did not change, is copied as well.
        bo = write_key(tmp_path, "bo")
        reg.sign(bo)
        # So is not one of a commit that is made while the sync runs.
        sign_commit(reg.handle.store, SigningKey.load(bo), "run", 7, Digest.of(b"commit 7"))
        sync(reg, there, ["run"])
        (left,) = {*signed(backend)} - {*signed(mirror)}
        assert left.startswith("signatures/run/00000000000000000007.")
        save_small(run, 3)
        backend.put("signatures/run/00000000000000000003." + "b" * 64, b"no signature")
        sync(reg, there)
        assert "a signature is not copied" in caplog.text
        assert len(signed(mirror)) == 2
        assert there.verify(deep=True).ok


def test_upkeep_leaves_signatures_alone_and_needs_none(
    reg, run, backend, key, trusted, monkeypatch
):
    monkeypatch.setattr(sealing, "_SAMPLED", 2**32)
    reg.upgrade()
    save_small(run, 1, 2, 3)
    run.retention.prune(Retention(last=2))
    reg.sign(key)
    before = contents(backend, "signatures/")
    whole = ([], [("run", "ana", 5)])
    assert reg.gc(grace_s=0).deleted
    assert any(b'"kind":"seal"' in one for one in contents(backend, "runs/run/log/").values())
    assert said(reg, trusted, deep=True) == whole
    reg.repack(compression="zstd", min_dead=0.01)
    assert said(reg, trusted, since_last=True) == said(reg, trusted, since_last=True) == whole
    run.retention.drop("a mistake")
    reg.gc(grace_s=0)
    assert said(reg, trusted) == ([unsigned(5, 5)], [("run", "ana", 5)])
    reg.run("run").retention.undrop()
    reg.sign(key)
    assert said(reg, trusted) == ([], [("run", "ana", 7)])
    reg.freeze()
    with pytest.raises(Frozen):
        reg.sign(key)
    (frozen,), vouched = said(reg, trusted)
    assert (frozen[0], vouched) == ("note", [("run", "ana", 7)])
    assert {
        name: data for name, data in contents(backend, "signatures/").items() if name in before
    } == before


def test_a_first_signature_raises_no_version(reg, run, key):
    reg.sign(key)
    assert reg.handle.store.config.min_writer == 1
    assert not contents(reg.handle.store.backend, "epochs/")


AGENT = """
import base64, sys
from cryptography.hazmat.primitives import serialization as s
_, path, more, what = sys.argv
key = s.load_pem_private_key(open(path, "rb").read(), b"secret")
if what == "public":
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    sys.stdout.buffer.write(public)
else:
    print(base64.b64encode(key.sign(sys.stdin.buffer.read() + more.encode())).decode())
"""


def test_a_key_is_a_file_a_variable_or_an_agent_that_the_user_names(
    reg, run, tmp_path, trusted, key, monkeypatch
):
    closed = write_key(tmp_path, "closed", password=b"secret")
    script = tmp_path / "an agent.py"
    script.write_text(AGENT)
    agent = "agent:" + shlex.join([sys.executable, str(script), closed])
    monkeypatch.setenv("KEY_OF_CI", Path(key).read_text())
    assert reg.sign("env:KEY_OF_CI")[0].is_new
    assert said(reg, trusted) == ([], [("run", "ana", 1)])
    assert reg.sign(f"{agent} ''")[0].is_new
    assert said(reg, tmp_path / "trusted-closed") == ([], [("run", "closed", 1)])
    save_small(run, 1)
    for source, why in [
        (f"{agent} x", "a signature that its public key refuses"),
        (f"agent:{sys.executable} -c 'raise SystemExit(3)'", "exit status 3"),
        ("agent:/no/such/command", "No such file"),
        ("agent:", "no command"),
        ("agent:a 'b", "No closing quotation"),
        (closed, "an unencrypted private key in PEM"),
        (write_key(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1())), "of another kind"),
        ("env:NONE", "not a private key"),
        (Path(key).read_text(), "a key in place of where it is"),
    ]:
        with pytest.raises(InvalidInput, match=why) as caught:
            reg.sign(source)
        assert "BEGIN" not in f"{caught.value!r} {caught.value}"


def test_trusted_keys_lie_outside_of_the_registry(tmp_path, key, trusted):
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        inside = tmp_path / "reg" / "ana.pem"
        inside.write_bytes((trusted / "ana.pem").read_bytes())
        with pytest.raises(InvalidInput, match="lie in the registry"):
            reg.verify(signed=inside)
        with pytest.raises(InvalidInput, match="no public keys"):
            reg.verify(signed=key)
        write_key(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
        with pytest.raises(InvalidInput, match="of another kind"):
            reg.verify(signed=tmp_path / "trusted-ec")
