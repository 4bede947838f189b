"""Generation with transformers' own forward pass: any causal LM, no server, the weights of the moment.

The rim of the engine: columns in, columns out, checks, and which rows share a batch. The loop is in `decoding`, drawing in
`sampling`, the cache in `kv_cache`. Legend: B prompts, R rows (B times the samples of each), T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.config import HFRolloutConfig, SamplingConfig
from podium.errors import DataError, RolloutError
from podium.models import eos_token_ids, pad_token_id
from podium.protocol import DataProto, whole_number
from podium.protocol import jagged as jg
from podium.rollout.base import BaseRollout
from podium.rollout.context import RolloutContext
from podium.rollout.decoding import Batch, Responses, decode
from podium.rollout.kv_cache import CachedModel
from podium.rollout.sampling import draw, uniforms
from podium.weights import copy_weights


class HFRollout(BaseRollout):
    """Rollout of a transformers model in this process, on the model's device."""

    Settings = HFRolloutConfig

    def __init__(self, context: RolloutContext[HFRolloutConfig]) -> None:
        """RolloutError for a model whose forward pass does not take transformers' cache."""
        model, tokenizer = context.load_model().to(context.device), context.tokenizer  # type: ignore[arg-type] # of `to`
        self._model: PreTrainedModel = model
        self._cached_model = CachedModel(model)
        self._eos_token_ids = eos_token_ids(model, tokenizer)
        self._pad_token_id = pad_token_id(model, tokenizer)
        self._max_rows = context.settings.max_rows
        self._tokenizer = tokenizer
        self._special_tokens = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `BaseRollout`. After an error no version is held, since the weights are a mixture."""
        self.version = None
        copy_weights(self._model, weights)
        self.version = version

    def _generate(self, prompts: DataProto, sampling: SamplingConfig, *, seed: int, step: int) -> DataProto:
        """See `BaseRollout`. The model runs in evaluation mode and keeps its own mode; stop strings decode the whole
        response after every token, which costs more than a small model's forward pass.

        Raises RolloutError for logits that are not finite.
        """
        version = self.require_version()
        uids = self._check(prompts, sampling)
        requests = [(uid, sample_index) for uid in uids for sample_index in range(sampling.n)]
        parameter = next(self._model.parameters())
        device, dtype = parameter.device, torch.promote_types(parameter.dtype, torch.float32)
        responses = Responses.empty(len(requests), sampling.max_new_tokens, dtype=dtype, device=device)
        uniform_RT = uniforms(requests, seed=seed, step=step, count=sampling.max_new_tokens).to(device)
        column, is_finished = prompts.batch["prompts"], self._is_finished(sampling.stop, device)
        with _evaluating(self._model), torch.no_grad():  # inference_mode would freeze buffers that a forward pass replaces
            for rows_R in self._batches(jg.lengths_of(column), sampling.n):
                batch = Batch.gather(column, rows_R, num_samples=sampling.n, pad_token_id=self._pad_token_id, device=device)
                decode(
                    self._cached_model,
                    batch,
                    uniform_RT,
                    responses,
                    draw=partial(draw, sampling=sampling),
                    is_finished=is_finished,
                )
        return _columns(requests, responses, version, column.device)

    def _check(self, prompts: DataProto, sampling: SamplingConfig) -> list[str]:
        """The uids, once it is sure that every prompt can be answered."""
        for kind, table, name in (("tensor", prompts.batch, "prompts"), ("object", prompts.non_tensor_batch, "uid")):
            if name not in table:
                raise DataError(f"generate needs the {kind} column {name!r}; there are: {', '.join(table) or 'none'}")
        uids = [_uid_text(row, uid) for row, uid in enumerate(prompts.non_tensor_batch["uid"])]
        if len(set(uids)) < len(uids):
            twice = next(uid for uid in uids if uids.count(uid) > 1)
            raise DataError(f"uid {twice!r} is on {uids.count(twice)} prompts, which would draw equal samples; set sampling.n")
        limit = self._cached_model.row_limit
        for uid, length in zip(uids, jg.lengths_of(prompts.batch["prompts"]).tolist(), strict=True):
            if not length:
                raise DataError(f"the prompt of row {uid!r} is empty; a model needs at least one token to start from")
            if limit is not None and length + sampling.max_new_tokens > limit.tokens:
                raise DataError(
                    f"the prompt of row {uid!r} has {length} tokens; with {sampling.max_new_tokens} new ones that is more than "
                    f"{limit.reason}; shorten the prompt or lower rollout.sampling.max_new_tokens"
                )
        return uids

    def _batches(self, lengths_B: Tensor, num_samples: int) -> Iterator[Tensor]:
        """Row numbers of each batch: like lengths side by side, in nearly equal parts of at most `max_rows`.

        Rows of one prompt stay together where they can, so that it is prefilled once. Different lengths share a batch by
        padding, which costs less than more and smaller batches, unless the model cannot pad.
        """
        sorted_B, order_B = lengths_B.cpu().sort(stable=True)
        order_R = (order_B[:, None] * num_samples + torch.arange(num_samples)).flatten()
        starts = [] if self._cached_model.can_pad else ((sorted_B.diff().nonzero().flatten() + 1) * num_samples).tolist()
        for group in order_R.tensor_split(starts):
            if len(group):
                yield from group.tensor_split(-(-len(group) // self._max_rows))

    def _is_finished(self, stop: tuple[str, ...], device: torch.device) -> Callable[[Tensor], Tensor]:
        last_ids = [*self._eos_token_ids, *[self._special_tokens[name] for name in stop if name in self._special_tokens]]
        ids = torch.tensor(last_ids, dtype=torch.int64, device=device)

        def is_finished(tokens_RT: Tensor) -> Tensor:
            is_last_R = torch.isin(tokens_RT[:, -1], ids)
            if stop:
                texts = map(self._text, tokens_RT.tolist())
                is_last_R |= torch.tensor([any(string in text for string in stop) for text in texts], device=device)
            return is_last_R

        return is_finished

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _uid_text(row: int, uid: object) -> str:
    """What keys the randomness of a prompt: an integer and its digits are the same uid."""
    if isinstance(uid, SupportsIndex) and not isinstance(uid, str):
        return str(whole_number(f"the uid of row {row}", uid))
    if uid is None or isinstance(uid, float | np.floating | np.bool_):
        raise DataError(f"the uid of row {row} must be a str or an integer, got {uid!r}")
    return str(uid)


def _columns(requests: Sequence[tuple[str, int]], found: Responses, version: int, device: torch.device) -> DataProto:
    """The new columns of the rows that `BaseRollout.generate` promises, on the device of the prompts."""
    tokens_RT, logprobs_RT, lengths_R = (part.to(device) for part in (found.tokens, found.logprobs, found.lengths))
    responses = jg.from_padded(tokens_RT, lengths_R)
    values, offsets = jg.parts(responses)
    logprobs = jg.jagged(jg.parts(jg.from_padded(logprobs_RT, lengths_R))[0], offsets)
    _check_finite(logprobs, requests)
    tensors = {
        "responses": responses,
        "response_mask": jg.jagged(torch.ones_like(values), offsets),
        "rollout_log_probs": logprobs,
        "sample_index": torch.tensor([index for _, index in requests], dtype=torch.int64, device=device),
        "weight_version": torch.full((len(requests),), version, device=device),
    }
    return DataProto(tensors, {"finish_reason": ["stop" if is_stopped else "length" for is_stopped in found.is_stopped.tolist()]})


def _check_finite(logprobs: Tensor, requests: Sequence[tuple[str, int]]) -> None:
    values, offsets = jg.parts(logprobs)
    bad_rows = jg.row_ids(offsets)[~values.isfinite()].tolist()
    if bad_rows:
        uid, sample_index = requests[bad_rows[0]]
        raise RolloutError(
            f"log-probs of {len(set(bad_rows))} of {len(requests)} rows are not finite, first in sample {sample_index} of prompt "
            f"{uid!r}; look for NaN or infinite weights, or an overflow in the model's dtype"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
