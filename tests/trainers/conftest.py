"""What several modules of tests share: a run whose warm-up made a model that solves some of the problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.trainers import RunDirectory
from tests.trainers.builders import WARM_UP, small_config, train


@pytest.fixture(scope="session")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with the warm-up and one step."""
    return train(small_config(tmp_path_factory.mktemp("warm"), *WARM_UP))


@pytest.fixture(scope="session")
def base(warmed_up: RunDirectory) -> Path:
    """The folder of the warmed-up model."""
    return warmed_up.warmup.hf
