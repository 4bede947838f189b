"""What a port changes: where names are imported from. `docs/coming-from-verl.md` shows the same table."""

from __future__ import annotations

import re

MODULES = {
    "verl": "podium.compat.verl",
    "verl.protocol": "podium.compat.verl",
    "verl.single_controller": "podium.compat.verl",
    "verl.single_controller.base": "podium.compat.verl",
    "verl.single_controller.base.decorator": "podium.compat.verl",
    "verl.single_controller.base.worker": "podium.compat.verl",
    "verl.single_controller.base.worker_group": "podium.compat.verl",
    "verl.single_controller.ray": "podium.compat.verl",
    "verl.single_controller.ray.base": "podium.compat.verl",
}

_FROM_VERL = re.compile(r"^from (verl[\w.]*) import", re.MULTILINE)


def ported(text: str) -> str:
    """The script with its import lines changed, and nothing else. KeyError for a module that the table does not have."""
    return _FROM_VERL.sub(lambda found: f"from {MODULES[found[1]]} import", text)
