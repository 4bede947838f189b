"""Podium: RL post-training of language models, conducted by one ordinary Python program.

The public names live in their layers (`podium.single_controller`, `podium.protocol`, ...); importing this package
imports none of them.
"""

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
