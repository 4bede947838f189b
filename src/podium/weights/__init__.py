"""The way of weights from a trainer to a rollout."""

from podium.weights.stream import copy_weights, named_weights

__all__ = ["copy_weights", "named_weights"]
