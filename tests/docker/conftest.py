"""The daemon, the images and the project, made once for all tests here."""
from __future__ import annotations

from collections.abc import Iterator

import docker_daemon
import pytest
from docker_stack import Stack


@pytest.fixture(scope="session")
def docker() -> Iterator[None]:
    """A running daemon."""
    with docker_daemon.daemon():
        yield


@pytest.fixture(scope="session")
def stack(docker: None) -> Iterator[Stack]:
    """The project with its images built and nothing started."""
    made = Stack(docker_daemon.base_image(), docker_daemon.wheels_image())
    yield made
    made.down()
