"""The stores of the stories."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from holdfast import Registry, Run
from tests.systems.hydra_life import CHAPTERS, Hydra, Reader
from tests.systems.life import Life, Story
from tests.systems.places import Place


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of sums must not depend on who else is on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["folder", "s3"])
def fresh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], str]:
    """Makes URLs of stores of one kind."""
    if request.param == "s3":
        return request.getfixturevalue("moto_url")
    return lambda: str(tmp_path_factory.mktemp("place") / "registry")


@pytest.fixture
def kind(request: pytest.FixtureRequest, fresh: Callable[[], str]) -> str:
    """The kind of the stores."""
    del fresh  # it has the parameter
    return str(request.node.callspec.params["fresh"])


@pytest.fixture
def story(request: pytest.FixtureRequest, kind: str, fresh: Callable[[], str]) -> Story:
    """The story of a module's `LIVES` on one kind of store, to its end."""
    return request.module.LIVES.on(kind, fresh).to_the_end()


@pytest.fixture
def trained(story: Story) -> Iterator[Registry]:
    """The registry of a story after its training, for reading."""
    with holdfast.open(story.place.url, read_only=True) as reg:
        yield reg


@pytest.fixture
def place(fresh: Callable[[], str]) -> Place:
    """An empty registry."""
    return Place.new(fresh)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the long lives in a bucket to a soak; in every run they are lived in a folder."""
    for item in items:
        long = ("/test_hydra", "/test_andrea", "/test_cobre", "/test_thalia", "publisher_that")
        named = any(one in item.nodeid for one in long) and getattr(item, "callspec", None)
        if named and named.params.get("fresh") == "s3":
            item.add_marker(pytest.mark.soak)


_HYDRAS: dict[str, Life[Hydra]] = {}


@pytest.fixture
def hydra(
    fresh: Callable[[], str],
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Life[Hydra]:
    """Hydra's life on one kind of store, as far as it was lived."""
    # A run that was dropped shows nothing of its life: who still asks gets another one.
    if kind not in _HYDRAS or _HYDRAS[kind].is_over:
        mirror = str(tmp_path_factory.mktemp("mirror") / "registry")
        _HYDRAS[kind] = Life(Hydra(Place.new(fresh), Place.new(lambda: mirror)), CHAPTERS)
    return _HYDRAS[kind]


@pytest.fixture
def read_hydra(hydra: Life[Hydra]) -> Iterator[Reader]:
    """Opens Hydra's run for reading."""
    opened: list[Registry] = []

    def read(chapter: Callable[[Hydra], None]) -> Run:
        story = hydra.through(chapter)
        opened.append(holdfast.open(story.place.url, read_only=True))
        return opened[-1].run(story.run_id)

    yield read
    for one in opened:
        one.close()
