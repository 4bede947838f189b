"""Where ranks run. `base` is the seam; `inline` and `ray` stand behind it and are imported when chosen."""

from podium.single_controller.runtime.base import Runtime, build_runtime
from podium.single_controller.runtime.capabilities import CAPABILITIES, Capabilities

__all__ = ["CAPABILITIES", "Capabilities", "Runtime", "build_runtime"]
