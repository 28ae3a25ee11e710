"""A program that reads by the clients of the Hub alone; `HF_ENDPOINT` is set.

Its arguments are an empty folder, and the folder that was pushed as run `whole`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download

ROOT, PUSHED = map(Path, sys.argv[1:])


def check() -> None:
    """Read files of the runs that the tests share in each way that the clients have."""
    api = HfApi()
    first, last = (api.model_info("llm", revision=f"main/step{step}").sha for step in (1, 2))
    assert last == api.model_info("llm", revision="latest").sha != first
    assert api.list_repo_files("lab/llm", revision="latest") == [
        *("README.md", "config.json", "model.safetensors", "tokenizer.json")
    ]
    (found,) = api.get_paths_info("llm", ["config.json", "none"], revision="tags/mine")
    assert found.size == (PUSHED / "config.json").stat().st_size
    folder = Path(snapshot_download("whole", revision="latest"))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (PUSHED / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "config.json", "model.safetensors", "tokenizer.json")
    ]
    file = Path(hf_hub_download("llm", "model.safetensors", revision="main/step1"))
    assert file.read_bytes() == (PUSHED / "model.safetensors").read_bytes()
    assert file.parent.name == first
    files = HfFileSystem()
    assert "lab/llm@latest/config.json" in files.ls("lab/llm@latest", detail=False)
    (name,) = files.glob("holdfast/whole/*.safetensors")
    whole = (PUSHED / "model.safetensors").read_bytes()
    assert files.cat_file(name, start=5, end=len(whole) - 5) == whole[5:-5]
    with files.open(name, block_size=100) as opened:
        assert opened.read() == whole
    command = [shutil.which("hf", path=str(Path(sys.executable).parent)) or "hf", "download"]
    subprocess.run([*command, "whole", "--local-dir", ROOT / "hf"], check=True, capture_output=True)
    assert (ROOT / "hf/model.safetensors").read_bytes() == whole


if __name__ == "__main__":
    check()
    print("done")
