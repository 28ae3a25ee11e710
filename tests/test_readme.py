"""Every snippet of the README runs, in order, and prints what the README says it prints.

Python blocks share one namespace, where `model`, `optimizer` and `train_step` are the reader's; sh
blocks run in bash with the command on the PATH, in the same folder. `<!-- not run: why -->` above a
block keeps it from running; `my-bucket` lies on an S3 server of this machine. A text block after a
Python block is what that prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_README = _ROOT / "README.md"
_PAGES = [
    *(_README, _ROOT / "CHANGELOG.md", _ROOT / "CONTRIBUTING.md"),
    *(_ROOT / "docs" / "glossary.md", _ROOT / "docs" / "security.md"),
    *(_ROOT / "docs" / "stores.md", _ROOT / "docs" / "fsspec.md"),
]
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment above it."""

    mark: str
    language: str
    text: str
    line: int


def _blocks() -> list[Block]:
    text = _README.read_text()
    return [
        Block(found[1] or "", found[2], found[3], text.count("\n", 0, found.start(3)) + 1)
        for found in _BLOCK.finditer(text)
    ]


@pytest.fixture
def clean_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, the command on the PATH, signals put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOLDFAST_REGISTRY", "checkpoints")
    monkeypatch.setenv("HOLDFAST_RUN", "pretrain-7")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def _readers_own() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(step: int) -> float:
        loss = (model(torch.full((4, 64), step / 300.0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return {"model": model, "optimizer": optimizer, "train_step": train_step}


def _run_python(block: Block, names: dict[str, Any]) -> str:
    # Line numbers of a traceback are those of the README.
    code = compile("\n" * (block.line - 1) + block.text, str(_README), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _run_sh(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"README line {block.line}:\n{block.text}\n{done.stdout}"


def test_every_snippet_runs(
    clean_world: Path, s3_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket="my-bucket")
    client.close()
    names = _readers_own()
    printed = ""
    ran = {"python": 0, "sh": 0, "text": 0}
    for block in _blocks():
        if block.mark.startswith("not run: ") or block.language == "json":
            continue
        if block.language == "python":
            printed = _run_python(block, names)
        elif block.language == "sh":
            _run_sh(block)
        elif block.language == "text":
            assert printed.splitlines() == block.text.splitlines(), f"README line {block.line}"
        ran[block.language] += 1
    assert min(ran.values()) >= 2
    names["reg"].close()


def test_what_the_snippets_leave_is_sound(clean_world: Path) -> None:
    import holdfast

    names = _readers_own()
    with holdfast.init("checkpoints"):
        pass
    blocks = [block for block in _blocks() if block.language == "python"]
    _run_python(blocks[0], names)
    first = names["reg"].checkpoint("digits/latest")
    assert (first.step, len(names["run"].checkpoints())) == (300, 3)
    before = {name: value.clone() for name, value in names["model"].state_dict().items()}
    # The same program again: it finds its end, and trains no step.
    names |= _readers_own()
    _run_python(blocks[0], names)
    assert names["reg"].checkpoint("digits/latest").digest == first.digest
    after = names["model"].state_dict()
    assert all((before[name] == after[name]).all() for name in before)
    names["reg"].close()


def test_a_requeued_job_goes_on(clean_world: Path) -> None:
    """The block for clusters: warned in mid-run, it saves and leaves; started again, it ends."""
    import holdfast

    with holdfast.init("checkpoints") as reg:
        (block,) = [
            block for block in _blocks() if "SIGTERM" in block.text and "checkpointer" in block.text
        ]
        names = {**_readers_own(), "holdfast": holdfast, "reg": reg}
        train_step = names["train_step"]

        def warned_at_150(step: int) -> float:
            if step == 150:
                signal.raise_signal(signal.SIGTERM)
            return float(train_step(step))

        with pytest.raises(SystemExit, match="143"):
            _run_python(block, {**names, "train_step": warned_at_150})
        run = reg.run("pretrain-7")
        assert (run.status, [ck.step for ck in run.checkpoints()]) == ("interrupted", [100, 150])
        _run_python(block, names)
        run.refresh()
        assert (run.status, [ck.step for ck in run.checkpoints()]) == (
            "completed",
            [100, 150, 200, 300],
        )


def test_the_first_two_commands_exist() -> None:
    first = _blocks()[0]
    assert first.language == "sh"
    scripts = re.findall(r"^sh (\S+)", first.text, re.M)
    assert len(scripts) == 2
    for script in scripts:
        assert (_ROOT / script).is_file()
        subprocess.run(["sh", "-n", str(_ROOT / script)], check=True)


def test_blocks_that_do_not_run_say_why() -> None:
    marks = {block.mark for block in _blocks()}
    assert all(re.fullmatch(r"|iam|not run: \w.*", mark) for mark in marks)
    assert {block.language for block in _blocks()} == {"python", "sh", "text", "json"}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("number", range(1, 9))
def test_every_promise_names_its_test(number: int) -> None:
    text = _README.read_text()
    (name,) = re.findall(rf"\(tests/promises/(test_promise_{number}_\w+\.py)\)", text)
    assert f"def {name.removesuffix('.py')}(" in (_ROOT / "tests/promises" / name).read_text()


Become = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def become(moto_server: Any, moto_url: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Become]:
    """Become a user with nothing but some statements, on a server that checks them."""
    import boto3

    user = f"trainer-{secrets.token_hex(4)}"
    session = boto3.session.Session()
    iam = session.client("iam")
    iam.create_user(UserName=user)
    key = iam.create_access_key(UserName=user)["AccessKey"]
    session.client("s3").create_bucket(Bucket=user)

    def check_from_call(number: bytes) -> None:
        address = f"{moto_server.endpoint_url}/moto-api/reset-auth"
        request = urllib.request.Request(address, number, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()

    def switch(statements: list[dict[str, Any]]) -> None:
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        check_from_call(b"inf")
        iam.put_user_policy(
            UserName=user,
            PolicyName="readme",
            PolicyDocument=policy.replace("my-bucket", user),
        )
        check_from_call(b"0")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        monkeypatch.setenv("GUARDED", f"s3://{user}")

    yield switch
    check_from_call(b"inf")


def _statements() -> list[dict[str, Any]]:
    (block,) = [block for block in _blocks() if block.mark == "iam"]
    found: list[dict[str, Any]] = json.loads(block.text)["Statement"]
    return found


def test_the_policy_is_enough(clean_world: Path, become: Become) -> None:
    import holdfast

    become(_statements())
    with holdfast.init(os.environ["GUARDED"] + "/team") as reg:
        run = reg.create_run("a")
        ck = run.save({"model": {"weight": bytes(100_000)}}, step=1)
        ck.report({"loss": 1.0})
        assert run.restore() is not None
        assert reg.verify(deep=True).findings == ()
    _run_sh(Block("", "sh", "holdfast doctor -r $GUARDED/team", 0))
    with pytest.raises(holdfast.RegistryError, match="access is denied"):
        holdfast.init(os.environ["GUARDED"] + "/other")


def test_the_policy_is_not_more_than_enough(clean_world: Path, become: Become) -> None:
    import holdfast

    listing, objects, deleting = _statements()
    get, put = ({**objects, "Action": action} for action in objects["Action"])
    for number, rest in enumerate(([get, put], [listing, get], [listing, put])):
        become([deleting, *rest])
        with pytest.raises(holdfast.RegistryError, match="access is denied"):
            holdfast.init(os.environ["GUARDED"] + f"/team/{number}")
    become(_statements())
    with holdfast.init(os.environ["GUARDED"] + "/team") as reg:
        reg.create_run("a").save({"model": {"weight": bytes(100_000)}}, step=1)
    become([listing, get])
    with holdfast.open(os.environ["GUARDED"] + "/team", read_only=True) as reg:
        assert reg.checkpoint("a/latest").load() == {"model": {"weight": bytes(100_000)}}
