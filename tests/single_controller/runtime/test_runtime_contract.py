"""Every runtime runs the public contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from podium.single_controller import CAPABILITIES
from podium.testing import CALL_CHECKS, LIFECYCLE_CHECKS, contract_group
from podium.testing.call_checks import ContractGroup

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=list(CAPABILITIES))
def runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    return name


@pytest.fixture(scope="module")
def group(runtime: str) -> Iterator[ContractGroup]:
    with contract_group(runtime) as shared:
        yield shared


@pytest.mark.parametrize("check", CALL_CHECKS, ids=lambda check: check.__name__)
def test_calls(group: ContractGroup, check: Callable[[ContractGroup], None]):
    check(group)


@pytest.mark.parametrize("check", LIFECYCLE_CHECKS, ids=lambda check: check.__name__)
def test_lifecycle(runtime: str, check: Callable[[str], None]):
    check(runtime)
