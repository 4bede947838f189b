"""Where ranks run. `base` is the seam; `inline` and `ray` stand behind it and are imported when chosen."""

from podium.runtimes import CAPABILITIES, Capabilities
from podium.single_controller.runtime.base import Runtime, build_runtime

__all__ = ["CAPABILITIES", "Capabilities", "Runtime", "build_runtime"]
