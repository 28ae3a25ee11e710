"""The module around the policies: its form, and what can be read off it.

Its provider cannot be fetched offline, so that nothing here applies it: only the sub-module of the
policies is validated, and applied by the other tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terraform.judges import ROOT, Terraform
from tests.terraform.operations import OPERATIONS, ROLES

_MODULE = ROOT / "terraform"


def _code(path: Path) -> str:
    """Return a file without its comments."""
    return re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.M)


def _block(head: str) -> str:
    """Return what stands between the braces of a block of main.tf."""
    code = _code(_MODULE / "main.tf")
    start = code.index(head) + len(head)
    return code[start : code.index("\n}\n", start)]


def _resource(kind: str, name: str = "registry") -> str:
    return _block(f'resource "{kind}" "{name}" {{')


def test_every_file_is_formatted(terraform: Terraform) -> None:
    done = terraform("fmt", "-check", "-diff", "-recursive", cwd=_MODULE)
    assert done.returncode == 0, done.stdout


def test_the_policies_are_valid(terraform: Terraform) -> None:
    done = terraform("validate", cwd=_MODULE / "policies")
    assert done.returncode == 0, done.stdout


def test_the_policies_need_no_provider() -> None:
    code = "".join(_code(path) for path in (_MODULE / "policies").glob("*.tf"))
    assert set(re.findall(r"^(\w+)", code, re.M)) == {"terraform", "locals", "output", "variable"}
    assert "required_providers" not in code


def test_no_rule_expires_what_is_current() -> None:
    lifecycle = _resource("aws_s3_bucket_lifecycle_configuration")
    blocks = set(re.findall(r"(\w+) \{", lifecycle))
    assert blocks == {
        "rule",
        "filter",
        "abort_incomplete_multipart_upload",
        "noncurrent_version_expiration",
        "expiration",
    }
    # S3 refuses it beside days or a date: it concerns marks of deletions alone.
    (expiration,) = re.findall(r"\bexpiration \{([^}]*)\}", lifecycle)
    assert expiration.split() == ["expired_object_delete_marker", "=", "true"]


def test_deleted_packs_go_after_days_and_history_after_weeks() -> None:
    lifecycle = _resource("aws_s3_bucket_lifecycle_configuration")
    rules = re.findall(
        r'id     = "(noncurrent-\w+)".*?noncurrent_days = ([^\n]*)', lifecycle, re.DOTALL
    )
    assert rules == [
        ("noncurrent-versions", "var.noncurrent_days"),
        ("noncurrent-packs", "min(var.noncurrent_pack_days, var.noncurrent_days)"),
    ]
    assert re.findall(r"prefix = (.*)", lifecycle) == [
        'var.prefix == "" ? "packs/" : "${var.prefix}/packs/"'
    ]
    declared = (_MODULE / "variables.tf").read_text()
    days = re.findall(r'"(noncurrent_\w+)" \{.*?default     = (\d+)', declared, re.DOTALL)
    assert days == [("noncurrent_pack_days", "3"), ("noncurrent_days", "30")]


def test_the_public_is_shut_out() -> None:
    access = _resource("aws_s3_bucket_public_access_block")
    assert re.findall(r"(\w+)\s*= (true|false)", access) == [
        ("block_public_acls", "true"),
        ("block_public_policy", "true"),
        ("ignore_public_acls", "true"),
        ("restrict_public_buckets", "true"),
    ]
    assert 'object_ownership = "BucketOwnerEnforced"' in _resource(
        "aws_s3_bucket_ownership_controls"
    )


def test_versions_are_kept_and_the_bucket_is_not_destroyed() -> None:
    assert 'status = "Enabled"' in _resource("aws_s3_bucket_versioning")
    assert "prevent_destroy = true" in _resource("aws_s3_bucket")
    assert "force_destroy" not in _code(_MODULE / "main.tf")


def test_variables_of_the_policies_are_passed_on() -> None:
    declared = re.findall(r'^variable "(\w+)"', _code(_MODULE / "policies/variables.tf"), re.M)
    passed = re.findall(r"^  (\w+)\s*= ", _block('module "policies" {'), re.M)
    assert sorted(passed) == sorted([*declared, "source"])


def test_attachments_have_keys_that_are_known_beforehand(
    terraform: Terraform, tmp_path: Path
) -> None:
    """The expression of main.tf, on values that are known only after apply."""
    code = (_MODULE / "main.tf").read_text()
    start = code.index("  attachments = ")
    expression = code[start : code.index("\n}\n", start)].replace("var.principals", "local.given")
    (tmp_path / "main.tf").write_text(
        'resource "terraform_data" "made" {\n  input = "x"\n}\n'
        "locals {\n  given = {\n"
        '    trainer = ["a", terraform_data.made.id]\n    operator = [terraform_data.made.id]\n'
        f"  }}\n{expression}\n}}\n"
        'resource "terraform_data" "each" {\n  for_each = local.attachments\n'
        "  input = each.value.arn\n}\n"
        'output "keys" {\n  value = keys(local.attachments)\n}\n'
    )
    assert terraform("init", "-input=false", cwd=tmp_path).returncode == 0
    done = terraform("plan", "-input=false", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for key in ("operator/0", "trainer/0", "trainer/1"):
        assert f'terraform_data.each["{key}"] will be created' in done.stdout


@pytest.mark.parametrize(
    ("arn", "is_refused"),
    [
        ("arn:aws:iam::123456789012:role/admins", False),
        ("arn:aws:iam::123456789012:role/of/a/path/admins", False),
        ("arn:aws:iam::210987654321:role/admins", True),
        ("arn:aws-cn:iam::123456789012:role/admins", True),
    ],
)
def test_the_role_of_another_account_is_refused(
    terraform: Terraform, tmp_path: Path, arn: str, is_refused: bool
) -> None:
    """The precondition of main.tf, in an account; attaching goes by the name of the role alone."""
    attachment = _resource("aws_iam_role_policy_attachment", "principal")
    condition = attachment[attachment.index("  lifecycle {") : attachment.index("\n  role ")]
    values = {
        "data.aws_partition.current.partition": "local.partition",
        "data.aws_caller_identity.current.account_id": "local.account",
    }
    for name, stand_in in values.items():
        assert name in condition
        condition = condition.replace(name, stand_in)
    (tmp_path / "main.tf").write_text(
        'locals {\n  partition = "aws"\n  account = "123456789012"\n}\n'
        f'resource "terraform_data" "it" {{\n  for_each = {{ x = {{ arn = "{arn}" }} }}\n'
        f"{condition}\n}}\n"
    )
    assert terraform("init", "-input=false", cwd=tmp_path).returncode == 0
    done = terraform("plan", "-input=false", cwd=tmp_path)
    assert (done.returncode != 0) == is_refused, done.stdout
    assert (f"{arn} is not a role of this account" in " ".join(done.stdout.split())) == is_refused


# The README


def _table() -> list[list[str]]:
    lines = [line for line in (_MODULE / "README.md").read_text().splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == len(ROLES) + 1]


def test_the_table_of_the_readme_is_the_one_that_is_tried() -> None:
    head, _, *rows = _table()
    assert head == ["", *ROLES]
    assert rows == [
        [operation.name, *("yes" if operation.may(role) else "" for role in ROLES)]
        for operation in OPERATIONS
    ]


def test_the_readme_names_every_variable_and_output() -> None:
    readme = (_MODULE / "README.md").read_text()
    code = _code(_MODULE / "variables.tf") + _code(_MODULE / "outputs.tf")
    for name in re.findall(r'^(?:variable|output) "(\w+)"', code, re.M):
        assert f"`{name}`" in readme, name


@pytest.mark.parametrize("there", [True, False])
def test_the_check_goes_on_without_terraform(tmp_path: Path, there: bool) -> None:
    """The lines of scripts/check that concern terraform, with one of ours on the PATH or none."""
    script = (ROOT / "scripts/check").read_text()
    start = script.index("if command -v terraform")
    lines = script[start : script.index("\nfi\n", start) + 4]
    if there:
        (tmp_path / "terraform").write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])")
        (tmp_path / "terraform").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-euc", lines],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == (2 if there else 1)
    assert ("'fmt'" in done.stdout) == ("'validate'" in done.stdout) == there
