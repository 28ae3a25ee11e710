"""fsspec's own tests of copying to the local disk, on files that were saved."""

from __future__ import annotations

from fnmatch import fnmatch

import numpy as np
import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests

from holdfast.filesystem import HoldfastFileSystem
from holdfast.registry.adapters.filesystem.session import Folder
from tests.registry.adapters.filesystem.conftest import URL


class _Saving(HoldfastFileSystem):
    """Saves what is written as artifacts, and shows them under the paths that the tests give them.

    The tests want any names in any folders, and a registry has its own. Listing, looking and
    reading are those of the file system.
    """

    protocol = "saving"
    run = None

    @property
    def _tree(self):
        self.real = super()._tree.root
        self.shown = vars(self).setdefault("shown", {})
        return self

    @property
    def root(self) -> Folder:
        return self._below("")

    def _below(self, prefix: str) -> Folder:
        def names():
            below = (path for path in self.shown if path.startswith(prefix))
            return dict.fromkeys(path[len(prefix) :].split("/")[0] for path in below)

        def get(name: str):
            path = f"{prefix}{name}"
            if path not in self.shown:
                is_folder = any(one.startswith(f"{path}/") for one in self.shown)
                return self._below(f"{path}/") if is_folder else None
            node = self.real
            for step in ("run", "artifacts", self.shown[path], "file", name):
                node = node.get(step)
            return node

        return Folder(names, get)

    def pipe(self, path, value=b""):
        artifact = f"file{len(self._tree.shown)}"
        state = {"file": {"name": path.rpartition("/")[2], "bytes": np.frombuffer(value, "u1")}}
        self.run.pins.artifacts.set(artifact, state)
        self.shown[path] = artifact

    touch = pipe

    def makedirs(self, path, *args, **kwargs):
        """A folder is there with its first file."""

    mkdir = makedirs

    def rm(self, path, recursive=False, maxdepth=None):
        self.shown = {one: name for one, name in self.shown.items() if not fnmatch(one, f"{path}*")}


class TestGet(AbstractFixtures, AbstractGetTests):
    @pytest.fixture
    def fs(self, fs, run):
        saving = _Saving(URL, skip_instance_cache=True)
        saving.run = run
        return saving

    @pytest.fixture
    def fs_path(self):
        return "top"

    @pytest.fixture
    def fs_join(self):
        return lambda *steps: "/".join(steps)

    @pytest.fixture
    def supports_empty_directories(self):
        return False
