"""One torch thread: these models are so small that threads only wait for each other."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(torch_globals_put_back: None) -> None:
    torch.set_num_threads(1)
