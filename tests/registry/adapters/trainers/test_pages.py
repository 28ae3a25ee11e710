"""The pages of docs/integrations: their snippets run, and their counts of lines are right."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.registry.adapters.trainers.children import KILLED, Children, Ranks, needs

torch = pytest.importorskip("torch")

from tests.registry.adapters.trainers.page_snippets import PAGES, blocks  # noqa: E402

_EXECUTE = "page_snippets.execute"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with holdfast.init(tmp_path / "checkpoints", skip_race_probe=True):
        return tmp_path


def latest(folder: Path, run: str) -> Any:
    with holdfast.open(folder / "checkpoints") as reg:
        return reg.checkpoint(f"{run}/latest")


@pytest.mark.parametrize("page", sorted(PAGES.iterdir()), ids=lambda page: page.name)
def test_a_page_fits_on_a_screen_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= (68 if page.name == "README.md" else 52)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_the_table_counts_the_lines() -> None:
    """With Holdfast the marked ones; without it all that are not an ellipsis."""
    text = (PAGES / "README.md").read_text()
    others = blocks("README.md")
    rows = re.findall(
        r"^\| [^|]* \| \[(\w+)\.md\]\(.*?\) \| (\d+) \| (\d+) with ([^|]*) \|$", text, re.M
    )
    assert len(rows) == len(others) == 5
    for name, ours, theirs, what in rows:
        assert blocks(f"{name}.md")[name].count("  # +") == int(ours), name
        (other,) = (block for mark, block in others.items() if mark in what.replace("`", ""))
        lines = [line for line in other.splitlines() if line != "..."]
        assert len(lines) == int(theirs), name


class TestRuns:
    """Each page's snippets, in a process of their own."""

    pytestmark = needs("lightning", "transformers", "accelerate", "peft", "torchdata", "wandb")

    @pytest.mark.parametrize(("page", "run"), [("torch.md", "plain"), ("accelerate.md", "loop")])
    def test_a_loop_is_killed_twice_and_continues_bit_for_bit(
        self, children: Children, folder: Path, tmp_path: Path, page: str, run: str
    ) -> None:
        """Within the first epoch of seven batches, and within the third, where an epoch counts."""
        other = tmp_path / "straight"
        with holdfast.init(other / "checkpoints", skip_race_probe=True):
            pass
        assert children.run(_EXECUTE, page, other) == 0
        for strike, saved in ((6, 5), (13, 15)):  # the second program begins at step 5
            assert children.run(_EXECUTE, page, folder, strike) == KILLED
            assert latest(folder, run).step == saved
        assert children.run(_EXECUTE, page, folder) == 0
        assert latest(folder, run).step == latest(other, run).step
        assert latest(folder, run).digest == latest(other, run).digest

    def test_two_ranks_with_accelerate_are_killed_and_continue_bit_for_bit(
        self, children: Children, reg: holdfast.Registry
    ) -> None:
        ranks, fit = Ranks(reg.url, children), "page_snippets.two_ranks_with_accelerate"
        assert ranks.run(2, fit, "straight", None) == [0, 0]
        for strike in (4, 6):  # within the first epoch of four batches, and the second
            assert ranks.run(2, fit, "killed", strike) == [KILLED, KILLED]
        assert ranks.run(2, fit, "killed", None) == [0, 0]
        found, wanted = (reg.checkpoint(f"{run}/latest") for run in ("killed", "straight"))
        assert found.digest == wanted.digest
        drawn = [found.load(only="batches")["batches"][n]["rng"]["torch.cpu"] for n in (0, 1)]
        assert not torch.equal(*drawn)

    @pytest.mark.skipif(
        not (find_spec("jax") and find_spec("optax")), reason="not installed: jax or optax"
    )
    def test_the_loop_of_jax_is_killed_and_continues_bit_for_bit(
        self, children: Children, folder: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "straight"
        with holdfast.init(other / "checkpoints", skip_race_probe=True):
            pass
        assert children.run(_EXECUTE, "jax.md", other) == 0
        assert children.run(_EXECUTE, "jax.md", folder, 13) == KILLED
        assert latest(folder, "jax").step == 10
        assert children.run(_EXECUTE, "jax.md", folder) == 0
        assert latest(folder, "jax").step == 20
        assert latest(folder, "jax").digest == latest(other, "jax").digest

    @pytest.mark.parametrize(
        ("page", "run"), [("lightning.md", "lit"), ("transformers.md", "tuned")]
    )
    def test_the_snippets_of_a_trainer_run(
        self, children: Children, folder: Path, page: str, run: str
    ) -> None:
        assert children.run(_EXECUTE, page, folder) == 0
        assert latest(folder, run).step == 8
        if page == "transformers.md":
            assert (folder / "release" / "model.safetensors").is_file()

    def test_wandb_gets_the_ref_and_the_id_and_no_data(
        self, children: Children, folder: Path
    ) -> None:
        assert children.run(_EXECUTE, "wandb.md", folder) == 0
        checkpoint = latest(folder, "digits")
        (record,) = folder.glob("wandb/offline-run-*/*.wandb")
        for text in (checkpoint.ref, str(checkpoint.digest)):
            assert f'"{text}"'.encode() in record.read_bytes()
        sent = [file.name for file in record.parent.rglob("*") if file.is_file()]
        weights = b"".join(t.tobytes() for t in [checkpoint["model/0.weight"][:].numpy()])
        assert weights not in record.read_bytes()
        assert not [name for name in sent if name.endswith((".pt", ".safetensors", ".ckpt"))]

    def test_without_a_wandb_run_there_is_an_error(self, children: Children) -> None:
        assert children.run("page_snippets.log_without_a_run") == 0
