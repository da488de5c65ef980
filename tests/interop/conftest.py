"""Fixtures of the tests against NVIDIA's own Dynamo 1.5.1.

One network, one folder and, per backend, one store and one frontend of theirs for the whole
session; what a test starts beside them ends with the test. When a test fails, it shows what
every process has logged meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.fleet import Fleet, oracle_python
from tests.interop.namespace import Network
from tests.interop.scene import Scene, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture(autouse=True)
def _inside(network: Network) -> Iterator[None]:
    with network.entered():
        yield


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(Fleet(tmp_path_factory.mktemp("interop"), oracle_python()))
    yield stage
    complaints = [*stage.complaints, *stage.fleet.close_all()]
    if complaints:
        pytest.fail("; ".join(complaints))


@pytest.fixture
def lone_stage(stage: Stage) -> Iterator[Stage]:
    """The stage for a test that plays its workers itself."""
    stage.fleet.news()
    yield stage
    print(stage.fleet.news())


@pytest.fixture
def scene(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """What one test needs, for its values of the axes (see ``axes``)."""
    backend, codec = request.param
    stage.fleet.news()  # what others have brought about
    stage.renew_frontends()
    scene = Scene(stage, backend, codec)
    yield scene
    news = stage.fleet.news()
    complaints = scene.close()
    print(news)
    if complaints:
        pytest.fail("; ".join(complaints))
