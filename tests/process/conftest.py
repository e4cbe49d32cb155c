"""Deployments that do not outlive their test."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment, Make


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a deployment of the fake engine in `tmp_path`; see `Deployment` for the options."""
    made: list[Deployment] = []

    def build(**options: object) -> Deployment:
        deployment = Deployment(tmp_path, **options)  # type: ignore[arg-type]
        made.append(deployment)
        return deployment

    yield build
    for deployment in made:
        deployment.close()
