"""Ranks as Ray actors. This package alone imports ray."""

from podium.single_controller.runtime.ray.runtime import RayRuntime

__all__ = ["RayRuntime"]
