"""Log-probs and entropies of one set of logits, without keeping more than the logits themselves.

Legend: N tokens, V vocabulary. Plain autograd would keep log-softmax, probabilities and their product, [N, V] each, and make
as many again on the way back. Here forward and backward go by blocks of tokens, and one gradient [N, V] is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_NUMBERS = 2**22
"""Logits per block: the few buffers of that size that are alive at once stay at 16 MiB each in float32."""


def logprobs_and_entropies(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """([N] log-softmax of the logits at the targets, [N] entropy of the softmax in nats), both with a graph.

    Entropy is -sum p log p, with gradient -p (log p + entropy) for the logits; a token of probability 0 adds 0 to both.
    """
    logprobs_N, entropies_N = _LogprobsAndEntropies.apply(logits_NV, targets_N)  # type: ignore[no-untyped-call]
    return logprobs_N, entropies_N


class _LogprobsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_N, entropies_N = logits_NV.new_empty(len(logits_NV)), logits_NV.new_empty(len(logits_NV))
        for block in _blocks(logits_NV):
            log_softmax_CV = _log_softmax(logits_NV[block])
            logprobs_N[block] = log_softmax_CV.gather(1, targets_N[block, None])[:, 0]
            entropies_N[block] = -(log_softmax_CV.exp() * log_softmax_CV).sum(-1)
        ctx.save_for_backward(logits_NV, targets_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        logits_NV, targets_N = ctx.saved_tensors
        logprob_gradient_N, entropy_gradient_N = gradients
        found_NV = torch.empty_like(logits_NV)
        for block in _blocks(logits_NV):
            log_softmax_CV = _log_softmax(logits_NV[block])
            slope_CV = torch.zeros_like(log_softmax_CV)  # of what is differentiated, for the log-softmax
            if logprob_gradient_N is not None:
                slope_CV.scatter_(1, targets_N[block, None], logprob_gradient_N[block, None])
            if entropy_gradient_N is not None:
                slope_CV -= log_softmax_CV.exp() * (log_softmax_CV + 1) * entropy_gradient_N[block, None]
            # torch's own formula, so that without an entropy gradient the bits are those of cross_entropy
            found_NV[block] = torch._log_softmax_backward_data(slope_CV, log_softmax_CV, 1, logits_NV.dtype)
        return found_NV, None


def _log_softmax(logits_CV: Tensor) -> Tensor:
    """Finite also where a logit is -inf, so that its zero probability times it is 0 and not NaN."""
    return logits_CV.log_softmax(-1).clamp_(min=torch.finfo(logits_CV.dtype).min)


def _blocks(logits_NV: Tensor) -> list[slice]:
    size = max(1, BLOCK_NUMBERS // max(1, logits_NV.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits_NV), size)]
