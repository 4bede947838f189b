"""Drawing one token per row: pure functions of logits and uniform numbers.

Legend: R rows, T tokens of a response, V vocabulary. What is not here: models and caches. No function changes the logits
that it is given: a model may own them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from podium.config import SamplingConfig
from podium.protocol import whole_number

_CDF_UNIT = 2.0**50  # probabilities are counted in units of 2**-50: their total stays below 2**53, exact in float64 too
_SLICE_ELEMENTS = 1 << 24  # logits treated at once: bounds the float64 copies at 128 MiB each for large vocabularies


def uniforms(requests: Iterable[tuple[str, int]], *, seed: int, step: int, count: int) -> Tensor:
    """[R, count] float64 in [0, 1): one stream per request (prompt uid, sample index), keyed by (seed, step, request).

    A row depends on its own request alone, never on the others or on its place; a longer row begins with the shorter one.
    An integer is the same key whatever its type, of Python, numpy or torch; DataError for a number that is not an integer.
    """
    seed, step = whole_number("seed", seed), whole_number("step", step)
    bits = np.random.Philox(key=0)
    stream = np.random.Generator(bits)
    state = bits.state  # setting it again is seven times cheaper than a new Philox per row
    rows = []
    for uid, sample_index in requests:
        key = repr((seed, step, str(uid), whole_number("sample index", sample_index)))
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        state["state"]["key"] = np.frombuffer(digest, dtype="<u8")
        bits.state = state
        rows.append(stream.random(count))
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw a token per row: (tokens [R] int64, log-probs [R] float32, or float64 where the logits are).

    uniform_R: float64 in [0, 1); unused at temperature 0, which takes the likeliest token, the first of equals.
    The log-prob is that of softmax(logits / temperature) before top-k and top-p; at temperature 0, of softmax(logits).
    Rows are independent, so large batches are worked off in slices.
    """
    rows_at_once = max(1, _SLICE_ELEMENTS // logits_RV.shape[1])
    parts = [
        _draw_slice(logits, uniform, sampling)
        for logits, uniform in zip(torch.split(logits_RV, rows_at_once), torch.split(uniform_R, rows_at_once), strict=True)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw_slice(logits_RV: Tensor, uniform_R: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    logprobs_RV = torch.log_softmax(wide_RV / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        tokens_R = logits_RV.argmax(dim=-1)
    elif sampling.top_k or sampling.top_p < 1:
        probs_RV, order_RV = kept_probs(logprobs_RV.double().exp(), top_k=sampling.top_k, top_p=sampling.top_p)
        tokens_R = order_RV.gather(1, inverse_cdf(probs_RV, uniform_R)[:, None])[:, 0]
    else:
        tokens_R = inverse_cdf(logprobs_RV.double().exp(), uniform_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def kept_probs(probs_RV: Tensor, *, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities that survive top-k, then top-p of what top-k left: (falling [R, V], which tokens they are [R, V]).

    Dropped tokens are 0 and the rest is not scaled to sum to one. Of equally likely tokens the lower id comes first, so
    exactly k are kept. top_k 0 and top_p 1 keep all.

    >>> kept_probs(torch.tensor([[0.125, 0.5, 0.375]]), top_k=0, top_p=0.75)
    (tensor([[0.5000, 0.3750, 0.0000]]), tensor([[1, 2, 0]]))
    """
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_RV[:, top_k:] = 0
    mass_RV = sorted_RV.cumsum(dim=-1)
    is_kept_RV = mass_RV - sorted_RV < top_p * mass_RV[:, -1:]
    return sorted_RV * is_kept_RV, order_RV


def inverse_cdf(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """[R] int64: the first index whose cumulated weight exceeds uniform * total; weights float64 summing to about 1.

    The sums are taken over integers (units of 2**-50), so they are the same in any order of adding: a weight of zero has
    a width of exactly zero on every device and cannot be drawn, which rounded floating sums do not promise.
    """
    cdf_RV = (weights_RV * _CDF_UNIT).to(torch.int64).cumsum(dim=-1)
    total_R = cdf_RV[:, -1]
    threshold_R = torch.minimum((uniform_R * total_R).to(torch.int64), total_R - 1)
    index_R = torch.searchsorted(cdf_RV, threshold_R[:, None], right=True)[:, 0]
    return index_R.clamp(max=weights_RV.shape[1] - 1)  # only rows of NaN get there; the caller reports their log-probs
