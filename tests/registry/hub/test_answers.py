"""Requests and answers, without any client: paths, ranges, codes, tokens, hosts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from holdfast.backends.wrappers import Call, Metered
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import open_on
from holdfast.registry.hub.access import Access, Token, read_tokens
from holdfast.registry.hub.catalog import refusal
from holdfast.registry.hub.requests import Asked, asked, paths_info
from holdfast.registry.hub.views import View
from tests.registry.hub.conftest import OPTIONS, Answer, Site, served
from tests.support.commands import invoke
from tests.support.stores import new_backend

pytestmark = pytest.mark.xdist_group("hub")


def sha_of(site: Site, revision: str = "latest", repo: str = "llm") -> str:
    found = json.loads(site.ask(f"/api/models/{repo}/revision/{quote(revision, safe='')}").body)
    sha: str = found["sha"]
    return sha


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/a/resolve/phase2%2Fbest/x/y.json", Asked("file", "a", "phase2/best", "x/y.json")),
        ("/p/a/resolve/main/y", Asked("file", "p/a", "main", "y")),
        ("/p/resolve/resolve/main/y", Asked("file", "p/resolve", "main", "y")),
        ("/api/models/a", Asked("info", "a")),
        ("/api/models/p/a", Asked("info", "p/a")),
        ("/api/models/p/tree/tree/main/f", Asked("tree", "p/tree", "main", "f")),
        ("/api/models/a/revision/tags%2Fx", Asked("info", "a", "tags/x")),
        ("/api/models/p/a/paths-info/main", Asked("paths-info", "p/a", "main")),
        ("/a/resolve/main", None),
        ("/a/b/c/resolve/main/f", None),
        ("/api/models", None),
        ("/api/datasets/a", None),
        ("/%ff/resolve/main/f", None),
    ],
)
def test_a_path_is_read_as_it_was_sent(path: str, wanted: Asked | None) -> None:
    assert asked(path.encode()) == wanted


def test_every_range_has_the_bytes_of_the_file(site: Site) -> None:
    path = f"/llm/resolve/{sha_of(site)}/model.safetensors"
    whole = site.ask(path)
    size = len(whole.body)
    header = int.from_bytes(whole.body[:8], "little") + 8
    edges = sorted({0, 1, 8, header - 1, header, header + 1, header + 140, size - 1, size})
    for start, stop in [*pairwise(edges), (0, size), (header - 1, header + 1), (5, size - 5)]:
        part = site.ask(path, Range=f"bytes={start}-{stop - 1}")
        assert part.body == whole.body[start:stop]
        assert part.status == (200 if (start, stop) == (0, size) else 206)
        if part.status == 206:
            assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    assert site.ask(path, Range="bytes=-7").body == whole.body[-7:]
    assert site.ask(path, Range=f"bytes={size - 7}-").body == whole.body[-7:]
    assert site.ask(path, Range=f"bytes=0-{10 * size}").status == 200
    for long in (f"bytes=0-{'9' * 30}", "bytes=-" + "9" * 30, f"bytes={'0' * 30}-"):
        assert site.ask(path, Range=long).body == whole.body
    for wrong in (f"bytes={size}-", "bytes=-0", "bytes=" + "9" * 30 + "-"):
        assert site.ask(path, Range=wrong).status == 416
    for none in ("bytes=2-1", "bytes=a-b", "items=1-2", "bytes=1-2,4-5", "bytes"):
        assert site.ask(path, Range=none).body == whole.body
    same = {"Range": "bytes=0-3", "If-Range": whole.headers["etag"]}
    assert site.ask(path, **same).body == whole.body[:4]
    assert site.ask(path, **{**same, "If-Range": '"other"'}).body == whole.body
    head = site.ask(path, "HEAD", Range="bytes=0-3")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(size))
    assert {**head.headers} == {**whole.headers, "date": head.headers["date"]}


def test_conditions_are_those_of_http(site: Site) -> None:
    path = f"/llm/resolve/{sha_of(site)}/config.json"
    whole = site.ask(path)
    etag = whole.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = site.ask(path, **{"If-None-Match": known, "Range": "bytes=0-3"})
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
    assert site.ask(path, **{"If-None-Match": '"other"'}).body == whole.body
    for other in ('"other"', f"W/{etag}"):
        assert site.ask(path, **{"If-Match": other}).status == 412
    for same in (etag, f'"other",{etag}', "*"):
        assert site.ask(path, **{"If-Match": same}).body == whole.body


def test_a_project_with_slashes_can_be_followed_to_its_files(tmp_path: Path) -> None:
    with (
        holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg,
        reg.create_run("r", project="team/llm") as run,
        served(tmp_path / "reg") as site,
    ):
        run.save({"model": {"w": b"old" * 1000}, "x": 1}, step=1)
        named = site.ask("/team%2Fllm/r/resolve/latest/README.md")
        assert named.status == 307
        assert site.ask(named.headers["location"]).status == 200


def test_a_name_leads_to_digits_which_stay_while_the_ref_moves(tmp_path: Path) -> None:
    with (
        holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg,
        reg.create_run("r") as run,
        served(tmp_path / "reg") as site,
    ):
        run.save({"model": {"w": b"old" * 1000}, "x": 1}, step=1)
        before = site.ask("/r/resolve/latest/README.md", "HEAD")
        run.save({"model": {"w": b"new" * 1000}, "x": 2}, step=2)
        after = site.ask("/r/resolve/latest/README.md", "HEAD")
    assert (before.status, after.status) == (307, 307)
    assert before.headers["location"] != after.headers["location"]
    assert before.headers["x-repo-commit"] in before.headers["location"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/none/resolve/main/config.json", "RepoNotFound"),
        ("/lab/none/resolve/main/config.json", "RepoNotFound"),
        ("/other/llm/resolve/main/config.json", "RepoNotFound"),
        ("/holdfast/llm/resolve/main/config.json", "RepoNotFound"),
        ("/..%2Fllm/resolve/main/config.json", "RepoNotFound"),
        ("/llm/../llm/resolve/main/x", "RepoNotFound"),
        ("/api/datasets/llm", "RepoNotFound"),
        ("/llm/resolve/none/config.json", "RevisionNotFound"),
        ("/llm/resolve/tags%2Fnone/config.json", "RevisionNotFound"),
        (f"/llm/resolve/{'0' * 40}/config.json", "RevisionNotFound"),
        ("/llm/resolve/..%2Fsecret%2Flatest/config.json", "RevisionNotFound"),
        ("/llm/resolve/latest/none.json", "EntryNotFound"),
        ("/llm/resolve/latest/../config.json", "EntryNotFound"),
        ("/llm/resolve/latest/%2Fetc%2Fpasswd", "EntryNotFound"),
        ("/llm/resolve/latest/old.bin", "EntryNotFound"),
        ("/llm/resolve/latest/run.py", "EntryNotFound"),
        ("/api/models/llm/tree/latest/additional_chat_templates", "EntryNotFound"),
    ],
)
def test_what_is_absent_has_the_code_that_the_clients_know(
    site: Site, path: str, code: str
) -> None:
    answer = site.ask(path)
    assert (answer.status, answer.code) == (404, code)
    assert (answer.headers["x-repo-commit"] is not None) == (code == "EntryNotFound")


def test_an_absent_run_is_answered_without_a_list_of_all_runs() -> None:
    backend, calls = new_backend(), list[Call]()
    with open_on(backend) as reg:
        reg.create_run("llm")
    with served(Metered(backend, calls)) as site:
        calls.clear()
        assert site.ask("/llmm/resolve/main/config.json").code == "RepoNotFound"
    assert [one.key for one in calls if one.method == "list" and one.key == "runs/"] == []
    assert calls  # the run itself was asked for


def test_refs_projects_and_digits_lead_to_a_state(site: Site) -> None:
    latest, best, release = (sha_of(site, one) for one in ("latest", "best", "releases/1.0.0"))
    assert len({latest, best, release}) == 3
    assert sha_of(site, "main") == release
    assert latest == sha_of(site, "tags/mine") == sha_of(site, "main/step2")
    assert latest == sha_of(site, latest) == sha_of(site, latest, "lab/llm")
    assert best == sha_of(site, best)
    assert sha_of(site, repo="holdfast/whole") == sha_of(site, repo="whole")


def test_another_process_finds_the_digits_and_other_options_do_not(
    site: Site, models: Path
) -> None:
    shas = [sha_of(site, one) for one in ("latest", "releases/1.0.0")]
    with served(models) as other:
        for sha in shas:
            assert other.ask(f"/llm/resolve/{sha}/config.json").status == 200
    with served(models, main="latest") as other:
        assert sha_of(other, "main") == shas[0]
    with served(models, options=replace(OPTIONS, shard_bytes=300)) as other:
        answer = other.ask(f"/llm/resolve/{shas[0]}/config.json")
        assert (answer.status, answer.code) == (404, "RevisionNotFound")
        names = json.loads(other.ask("/api/models/llm/tree/latest?recursive=true").body)
        index = json.loads(
            other.ask(f"/llm/resolve/{sha_of(other)}/model.safetensors.index.json").body
        )
        shards = {one["path"]: one["size"] for one in names if "-of-" in one["path"]}
        assert set(index["weight_map"].values()) == set(shards)
        assert len(shards) == 3  # tensors of 140, 160, 180 and 200 bytes


def test_a_tree_lists_files_and_folders(site: Site) -> None:
    entries = json.loads(site.ask("/api/models/whole/tree/latest?recursive=true").body)
    recorded = {one["path"]: one["lfs"]["oid"] for one in entries if "lfs" in one}
    assert {"config.json", "tokenizer.json", "model.safetensors"} == set(recorded)
    for name, oid in recorded.items():
        answer = site.ask(f"/whole/resolve/{sha_of(site, repo='whole')}/{name}")
        assert hashlib.sha256(answer.body).hexdigest() == oid == answer.headers["etag"].strip('"')
    bare = json.loads(site.ask("/api/models/llm/tree/latest").body)
    assert not [one for one in bare if "lfs" in one]
    tags = {
        one["path"]: site.ask(f"/llm/resolve/{sha_of(site)}/{one['path']}", "HEAD") for one in bare
    }
    etags = [answer.headers["etag"].strip('"') for answer in tags.values()]
    assert len({*etags}) == len(etags)
    assert not any(len(one) == 64 for one in etags)


def test_many_paths_look_at_the_files_once() -> None:
    class Files(dict[str, Any]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            Files.looks += 1
            return super().__iter__()

    files = Files({"a/b/c.json": None, "ab.json": None})
    made = View(None, files, {}, "0" * 40)  # type: ignore[arg-type]
    found = paths_info(made, [*map(str, range(999)), "a", "a/b/", "a/b/c", "ab", "/a", ""])
    assert [one["path"] for one in found] == ["a", "a/b"]
    assert Files.looks == 1


# Who may ask


@pytest.fixture
def guarded(models: Path, tmp_path: Path) -> Access:
    file = tmp_path / "tokens"
    lines = [("all", "*", "operator"), ("some", "llm,whole-*", "reader")]
    digests = [
        (hashlib.sha256(text.encode()).hexdigest(), runs, name) for text, runs, name in lines
    ]
    file.write_text("# digest, runs, name\n\n" + "\n".join(" ".join(one) for one in digests))
    return read_tokens(file)


def same(answer: Answer) -> tuple[int, bytes, dict[str, str]]:
    headers = {name: text for name, text in answer.headers.items() if name != "date"}
    return answer.status, answer.body, headers


def test_a_token_reads_its_runs_and_learns_nothing_of_others(models: Path, guarded: Access) -> None:
    own = {"Authorization": "Bearer some"}
    with served(models, access=guarded) as site:
        assert site.ask("/api/models/llm", **own).status == 200
        assert site.ask("/api/models/secret", Authorization="Bearer all").status == 200
        with site.source.meter.measure() as usage:
            for end in ("", "/revision/latest", "/tree/main"):
                hidden = site.ask(f"/api/models/secret{end}", **own)
                assert same(hidden) == same(site.ask(f"/api/models/absent{end}", **own))
                assert same(hidden) == same(site.ask(f"/api/models/x/secret{end}", **own))
        assert usage.requests == 0
        assert same(site.ask("/secret/resolve/main/config.json", **own)) == same(
            site.ask("/llm-none/resolve/main/config.json", **own)
        )
        # Absent although allowed: it is looked for, and the answer is the same.
        assert same(site.ask("/api/models/whole-x", **own)) == same(
            site.ask("/api/models/secret", **own)
        )
        for stranger in ({}, {"Authorization": "Bearer hf_theirs"}, {"Authorization": "some"}):
            expected = 200 if stranger.get("Authorization") == "some" else 401
            answer = site.ask("/api/models/llm", **stranger)
            assert answer.status == expected
            assert answer.headers["www-authenticate"] == (None if expected == 200 else "Bearer")
    said = "\n".join(site.lines)
    assert " reader GET /api/models/llm 200 " in said
    assert not [text for text in ("hf_theirs", "Bearer", "some") if text in said]


def test_the_host_is_checked_and_nothing_is_written(site: Site) -> None:
    for host in ("evil.example", f"evil.example:{site.port}", "127.0.0.1"):
        answer = site.ask("/api/models/llm", Host=host)
        assert answer.status == 421
        assert b"llm" not in answer.body
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST"):
        refused = site.ask("/api/models/llm", method)
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    assert site.ask("/healthz", Host="10.0.0.1").body == b"ok\n"
    metrics = site.ask("/metrics").body.decode()
    assert 'holdfast_hub_requests_total{status="421"} 3.0' in metrics
    assert "llm" not in metrics


@pytest.mark.parametrize(
    "line", ["hf_secret * me", f"{'0' * 64} *", f"{'0' * 63} * me", f"{'0' * 64} a,,b me", "#"]
)
def test_a_file_of_tokens_is_refused_without_being_repeated(tmp_path: Path, line: str) -> None:
    (tmp_path / "tokens").write_text(line)
    with pytest.raises(InvalidInput) as caught:
        read_tokens(tmp_path / "tokens")
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [["--listen", "0.0.0.0"], ["--listen", "0.0.0.0", "--no-token"],
     ["--no-token", "--token-file", "tokens"],
     ["--listen", "0.0.0.0", "--token-file", "tokens"],
     ["--listen", "0.0.0.0", "--token-file", "tokens", "--behind-tls"]],
)  # fmt: skip
def test_the_command_refuses_to_be_open(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokens").write_text(f"{'0' * 64} * me\n")
    result = invoke("hub", models, *options)
    assert result.exit_code == 3, result.output


def test_names_that_the_clients_refuse_are_told_at_the_start() -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    for name in (
        "a",
        "A.b_c-d",
        "a" * 96,
        "a" * 97,
        "a--b",
        "a..b",
        "-a",
        "a-",
        "_a",
        "a.git",
        "é",
    ):
        try:
            validate_repo_id(name)
            accepted = True
        except HFValidationError:
            accepted = False
        assert (refusal(name) is None) == accepted, name


def test_patterns_are_of_whole_names() -> None:
    token = Token(b"", ("llm-*", "one"), "me")
    assert [token.allows(one) for one in ("llm-a", "one", "none", "LLM-a", "x-llm-a")] == [
        True, True, False, False, False,
    ]  # fmt: skip
