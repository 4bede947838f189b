"""The public conformance kit: what an implementation behind one of Podium's seams must do, as code to run against it."""

from podium.testing.call_checks import CALL_CHECKS
from podium.testing.lifecycle_checks import LIFECYCLE_CHECKS
from podium.testing.runtime_contract import check_runtime, contract_group

__all__ = ["CALL_CHECKS", "LIFECYCLE_CHECKS", "check_runtime", "contract_group"]
