"""The public conformance kit: what an implementation behind one of Podium's seams must do, as code to run against it."""

from podium.testing.runtime_contract import CALL_CHECKS, LIFE_CHECKS, check_runtime, contract_group

__all__ = ["CALL_CHECKS", "LIFE_CHECKS", "check_runtime", "contract_group"]
