"""The example notebook runs in a real kernel, and each object shows itself."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.registry.face.factory import open_on
from tests.support.pages import ROOT, run_page
from tests.support.states import small_state
from tests.support.stores import new_backend

#: One worker executes the notebook.
pytestmark = pytest.mark.xdist_group("notebook")
NOTEBOOK = ROOT / "examples" / "notebook" / "tour.ipynb"
FIGURE = "application/vnd.plotly.v1+json"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the cells of the notebook with the outputs that a kernel gave."""
    for module in ("ipykernel", "pyarrow", "plotly", "pandas"):
        pytest.importorskip(module)
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("PLOTLY_RENDERER", "plotly_mimetype")  # without 5 MB of script for each figure
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        client = nbclient.NotebookClient(
            nbformat.read(NOTEBOOK, as_version=4),
            timeout=600,
            startup_timeout=600,  # a kernel imports for minutes on a loaded machine
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        return client.execute().cells


def outputs(cells: list[Any], begins: str) -> dict[str, str]:
    """Return what the cell that begins so shows, by media type; of several outputs the last."""
    (cell,) = (one for one in cells if f"{one.source}\n".startswith(begins))
    found: dict[str, str] = {}
    for output in cell.outputs:
        found |= output.get("data", {})
    return found


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        ("reg = ", ["<b>Registry</b>", "waves"]),
        ("run\n", ["<b>Run</b>", "best loss", "trained"]),
        ("best = ", ["<b>Checkpoint</b>", "float32"]),
        ("reg.diff", ["<b>Diff</b>", "model/w"]),
        ("run.history.table", ["loss", "<th>9</th>"]),
        ("reg.runs_table", ["best_step", "latest_step"]),
        ("run.retention.prune", ["<b>Retention plan</b>", "evicted step"]),
        ('with reg.progress("ver', ["<b>Collection</b>", "dry run"]),
    ],
)
def test_a_cell_shows_its_object(cells, begins: str, expected: list[str]) -> None:
    html = outputs(cells, begins)["text/html"]
    assert all(text in html for text in expected)


def test_a_figure_is_shown_with_every_curve(cells) -> None:
    figure: Any = outputs(cells, "run.history.plot")[FIGURE]
    assert [one["name"] for one in figure["data"]] == [
        *("loss", "losses/train", "losses/test", "best loss")
    ]


def test_progress_is_shown_and_updated(cells) -> None:
    (cell,) = (one for one in cells if one.source.startswith("with reg.progress"))
    bars = [one.data["text/html"] for one in cell.outputs if "<progress" in str(one.data)]
    assert len(bars) == 1
    assert "verifying: " in bars[0]
    assert "verifying: 0 B" not in bars[0]


def test_the_notebook_is_kept_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    code = [one for one in kept.cells if one.cell_type == "code"]
    assert [one.source for one in code if one.outputs or one.execution_count] == []


def test_the_snippets_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    with open_on(new_backend()) as reg:
        run = reg.create_run("run")
        run.streams["losses"].append({"step": 1, "train": 0.5, "test": 0.75})
        ck = run.save(small_state(), step=1, metrics={"loss": 0.5, "accuracy": 0.75})
        names = {"reg": reg, "run": run, "ck": ck}
        assert run_page(ROOT / "docs" / "notebooks.md", names, monkeypatch) == {"python": 3}
