"""What every test shares: no network, repeatable property tests, torch's global settings put back, one Ray cluster.

The environment is set here, at import, since worker processes inherit it and libraries read it once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.update(
    HF_HUB_OFFLINE="1",  # a test that would ask a model hub fails at once instead
    TRANSFORMERS_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # the future behaviour; without it Ray warns at every start
    TOKENIZERS_PARALLELISM="false",  # tokenizers warns when a process forks after using its threads
)

RAY_LOGICAL_CPUS = 64  # ranks that may live at once; Ray only counts them, whatever the machine has

# No deadline: a shared machine stalls for longer than any sensible one. The fast suite draws the same examples every time.
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("fast")


@pytest.fixture(autouse=True)
def torch_globals_put_back() -> Iterator[None]:
    """Thread count, default dtype and grad mode are process-wide: a test that sets them does not decide the next one's bits."""
    torch = sys.modules.get("torch")
    if torch is None:  # nothing to keep; a test of pure Python does not pay for the import
        yield
        return
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster for the whole session; a test (or a module, by `usefixtures`) that needs Ray asks for it."""
    ray = pytest.importorskip("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(address="local", num_cpus=RAY_LOGICAL_CPUS, include_dashboard=False, object_store_memory=512 * 2**20)
    yield
    if ours:
        ray.shutdown()
