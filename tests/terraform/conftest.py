"""The policies as terraform gives them, and servers that judge by them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import serving
from tests.terraform.judges import (
    PLACEHOLDER,
    PREFIX,
    ROOT,
    Apply,
    Become,
    GuardJudge,
    Judge,
    MotoJudge,
    Policies,
    Terraform,
    World,
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker apply the policies and start the judges."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("terraform"))


@pytest.fixture(scope="session")
def terraform() -> Terraform:
    """Run terraform with some words in some folder, without the settings of whoever runs this."""
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    environment = {name: value for name, value in os.environ.items() if name[:3] != "TF_"}
    # It asks for no newer version of itself, reads nobody's settings, and gives plain text.
    environment |= {
        "CHECKPOINT_DISABLE": "1",
        "TF_CLI_CONFIG_FILE": os.devnull,
        "TF_CLI_ARGS": "-no-color",
        "TF_IN_AUTOMATION": "1",
    }

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["terraform", *words],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def apply(terraform: Terraform, tmp_path_factory: pytest.TempPathFactory) -> Apply:
    """Apply the sub-module of policies to variables; without a state and without a network."""

    def applied(**variables: str | bool | list[str]) -> Policies:
        folder = tmp_path_factory.mktemp("policies")
        for file in (ROOT / "terraform" / "policies").glob("*.tf"):
            shutil.copy(file, folder)
        (folder / "values.auto.tfvars.json").write_text(json.dumps(variables))
        for words in (["init", "-input=false"], ["apply", "-input=false", "-auto-approve"]):
            done = terraform(*words, cwd=folder)
            assert done.returncode == 0, done.stdout
        outputs = json.loads(terraform("output", "-json", cwd=folder).stdout)
        roles = {role: json.loads(text) for role, text in outputs["roles"]["value"].items()}
        return Policies(roles, json.loads(outputs["bucket_policy"]["value"]))

    return applied


@pytest.fixture(scope="session")
def policies(apply: Apply) -> Policies:
    """The policies that the servers judge by."""
    return apply(bucket=PLACEHOLDER, prefix=PREFIX)


@pytest.fixture(scope="session")
def moto_judge() -> Iterator[Judge]:
    """Code of others, without conditions."""
    with serving("tests.servers.moto_process") as endpoint:
        yield MotoJudge(endpoint)


@pytest.fixture(scope="session")
def guard_judge() -> Iterator[Judge]:
    """Code of ours, with conditions."""
    with serving("tests.terraform.guarded_moto") as endpoint:
        yield GuardJudge(endpoint)


@pytest.fixture
def world(guard_judge: Judge, policies: Policies) -> World:
    """A bucket of one's own, where conditions are heeded."""
    return guard_judge.world(policies)


@pytest.fixture
def become(world: World, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Work with the credentials of a role from here on; gives the registry's URL."""

    def switch(role: str) -> str:
        world.roles[role].set_environment(monkeypatch)
        return world.url

    return switch
