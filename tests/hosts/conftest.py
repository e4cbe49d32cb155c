"""Hosts that do not outlive their test."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_net import Hosts, prepare

MakeHosts = Callable[..., Hosts]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Makes the three hosts, not yet started; see `Hosts` for the options."""
    if why := prepare():
        pytest.skip(why)
    made: list[Hosts] = []

    def build(**options: Any) -> Hosts:
        made.append(Hosts(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()
