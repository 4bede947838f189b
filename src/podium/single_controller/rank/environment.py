"""Which environment variables of the driver its ranks get on nodes whose Ray another process started."""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = ("CUBLAS_", "GLOO_", "HF_", "NCCL_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_")
"""Of libraries that read them once, in the process that they decide about. Docs: "Several machines"."""
SECRET = "_TOKEN"
"""Ray shows the environment of a process on its dashboard and in its logs, so a secret is not forwarded unasked."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks get as the driver has them.

    >>> forwarded({"HF_HOME": "/hf", "HF_TOKEN": "s", "TOKENIZERS_PARALLELISM": "0", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"})
    {'HF_HOME': '/hf', 'TOKENIZERS_PARALLELISM': '0'}
    """
    return {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES) and not name.endswith(SECRET)}
