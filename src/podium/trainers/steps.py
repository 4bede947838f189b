"""The driver's steps of RL as plain functions of rows: each states the columns that it reads and writes, and has no other state.

What moves between driver and ranks, and in which order the steps run, is in `ppo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.algorithms import AdvantageEstimator, Advantages, RewardedRows, group_ids, kl_of_rows, kl_of_tokens
from podium.config import AlgorithmConfig
from podium.datasets import prompt_batch
from podium.errors import DataError
from podium.observability import Mean, Metrics
from podium.parts import ADVANTAGE_ESTIMATORS
from podium.protocol import DataProto, without_padding
from podium.protocol.jagged import is_jagged, jagged, parts, row_ids
from podium.single_controller import DataProtoFuture
from podium.tasks import Problem, Scorer
from podium.trainers.dataflow import RowStep, Step, row_step

PROMPTS = Step("prompts", (), ("prompts", "uid"))
OLD_LOG_PROBS_AS_DRAWN = Step("old_log_probs_as_drawn", ("rollout_log_probs",), ("old_log_probs",))
"""A column under a second name, which moves nothing."""


def prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    chat_template: Literal["auto", "always", "never"],
) -> DataProto:
    """The prompts of a step, a row each: `prompts` [B, *] and `uid`. `step` in the meta keys the randomness of sampling."""
    texts, uids = [problem.prompt for problem in problems], [problem.uid for problem in problems]
    rows = prompt_batch(texts, uids, tokenizer, chat_template=chat_template)
    rows.meta_info["step"] = step
    return rows


@row_step(reads=["uid"], writes=["problem"])
def problems(rows: DataProto, of_uid: Mapping[str, Problem]) -> DataProto:
    """The problem that each row answers."""
    return DataProto(non_tensor_batch={"problem": [of_uid[uid] for uid in rows.non_tensor_batch["uid"]]})


@row_step(reads=["problem", "response"], writes=["rewards", "is_scored"])
def score(rows: DataProto, scorer: Scorer) -> DataProto:
    """`rewards` [B] float32, and `is_scored` [B] bool.

    A row whose reward failed, and that `reward.on_failure: drop` leaves out, has NaN and False.
    """
    found = scorer(rows.non_tensor_batch["problem"].tolist(), rows.non_tensor_batch["response"].tolist())
    columns = {"rewards": torch.tensor(found.values), "is_scored": torch.tensor(found.is_scored)}
    return DataProto(columns, meta_info={"reward_metrics": found.metrics})


@row_step(reads=["response_mask", "is_scored"], writes=["response_mask"])
def mask_unscored(rows: DataProto) -> DataProto:
    """A response mask of zeros for rows without a score: they are in no loss."""
    mask_N, offsets = parts(rows.batch["response_mask"])
    return DataProto({"response_mask": jagged(mask_N * rows.batch["is_scored"][row_ids(offsets)], offsets)})


@row_step(reads=["old_log_probs", "ref_log_prob", "response_mask"], writes=["reward_kl"])
def reward_kl(rows: DataProto, *, kind: str) -> DataProto:
    """`reward_kl` [B] float64: the KL divergence from the reference, summed over the response, by the estimator `kind`."""
    kl_B = kl_of_rows(kind, rows)
    penalty = Mean(float(kl_B.sum()), float(parts(rows.batch["response_mask"])[0].sum()))
    return DataProto({"reward_kl": kl_B}, meta_info={"kl_metrics": Metrics({"actor/reward_kl_penalty": penalty})})


@row_step(reads=["old_log_probs", "ref_log_prob", "response_mask"], writes=["token_reward_kl"])
def token_reward_kl(rows: DataProto, *, kind: str) -> DataProto:
    """`token_reward_kl` [B, *] float64: the KL divergence from the reference at each token, 0 under a zero mask."""
    kl_N, (mask_N, offsets) = kl_of_tokens(kind, rows), parts(rows.batch["response_mask"])
    penalty = Mean(float(kl_N.sum()), float(mask_N.sum()))
    return DataProto(
        {"token_reward_kl": jagged(kl_N, offsets)}, meta_info={"kl_metrics": Metrics({"actor/reward_kl_penalty": penalty})}
    )


@row_step(reads=["uid", "rewards", "is_scored"], writes=["advantages"])
def advantages(
    rows: DataProto, estimator: AdvantageEstimator, *, num_tokens_B: Tensor, kl_coef: float | None = None
) -> DataProto:
    """`advantages`, [B] of an estimator of rows and [B, *] of one of tokens; and `returns`, where the estimator gives them.

    `num_tokens_B`: how many tokens of each row can be learned from. A row without any, or without a score, is in no baseline.
    With `kl_coef`, that times `reward_kl` (`token_reward_kl`, for an estimator of tokens) is taken from the rewards.
    """
    scores_B, is_scored_B = rows.batch["rewards"].double(), rows.batch["is_scored"]
    is_counted_B = is_scored_B & (num_tokens_B > 0)
    for row in (is_counted_B & ~torch.isfinite(scores_B)).nonzero().flatten()[:1].tolist():
        raise DataError(
            f"the reward of row {row} is {float(scores_B[row])}; score it, or leave the row out by False in is_scored[{row}]"
        )
    is_of_tokens = estimator.level == "token"
    if kl_coef is not None and not is_of_tokens:
        scores_B = scores_B - kl_coef * rows.batch["reward_kl"]
    mask_N, offsets = parts(rows.batch["response_mask"]) if is_of_tokens else (None, None)
    rewards = scores_B
    if mask_N is not None and offsets is not None:
        rewards = _at_last_token(torch.where(is_counted_B, scores_B, 0.0), mask_N, offsets)
        if kl_coef is not None:
            rewards = rewards - kl_coef * parts(rows.batch["token_reward_kl"])[0]
    found = estimator(
        RewardedRows(
            rewards,
            groups_B=group_ids(rows.non_tensor_batch["uid"].tolist()),
            is_counted_B=is_counted_B,
            num_tokens_B=num_tokens_B,
            mask_N=mask_N,
            offsets=offsets,
            columns={name: _plain(rows.batch[name]) for name in estimator.reads},
        )
    )
    kind = type(estimator).__name__
    if not isinstance(found, Advantages):
        raise DataError(f"{kind} must return Advantages(advantages), got a {type(found).__name__}")
    if estimator.gives_returns != (found.returns is not None):
        given = "did not return" if found.returns is None else "returned"
        raise DataError(f"{kind} {given} returns, but its gives_returns is {estimator.gives_returns}: change one of the two")
    values = {"advantages": found.advantages, **({} if found.returns is None else {"returns": found.returns})}
    return DataProto({name: _column(estimator, name, value, rewards, offsets) for name, value in values.items()})


@row_step(reads=["uid"], writes=["mini_batch"])
def mini_batches(rows: DataProto, *, num_prompts: int, size: int, epochs: int, seed: int, step: int) -> DataProto:
    """`mini_batch` [B, epochs] int64: mini-batches of `size` prompts, each prompt with all its rows.

    The first epoch goes in the order of the prompts, each later one in an order keyed by (seed, step, epoch).
    """
    places = [torch.arange(num_prompts)]
    for epoch in range(1, epochs):
        places.append(torch.from_numpy(np.random.default_rng([seed, step, epoch]).permutation(num_prompts)))
    groups_B = group_ids(rows.non_tensor_batch["uid"].tolist())
    return DataProto({"mini_batch": torch.stack([place // size for place in places], dim=1)[groups_B]})


def advantage_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    """The estimator that the settings ask for."""
    section = algorithm.adv_estimator
    estimator: AdvantageEstimator = ADVANTAGE_ESTIMATORS.resolve(section.name, section.source)(section)
    return estimator


def with_advantages(batch: DataProtoFuture, algorithm: AlgorithmConfig, estimator: AdvantageEstimator) -> DataProtoFuture:
    """The steps from rewards to advantages: `advantage_steps`; `mask_unscored` runs only where a row does not have a score."""
    if not without_padding(batch).get(keys=["is_scored"]).batch["is_scored"].all():
        batch = mask_unscored.on(batch)
    if algorithm.use_kl_in_reward:
        batch = _kl_step(estimator).on(batch, kind=algorithm.kl_penalty)
    return _advantage_step(algorithm, estimator).on(
        batch,
        estimator,
        num_tokens_B=num_learnable_tokens(without_padding(batch)),
        kl_coef=algorithm.kl_coef if algorithm.use_kl_in_reward else None,
    )


def advantage_steps(algorithm: AlgorithmConfig, estimator: AdvantageEstimator) -> list[Step]:
    """The steps that `with_advantages` does."""
    kl = [_kl_step(estimator).step] if algorithm.use_kl_in_reward else []
    return [mask_unscored.step, *kl, _advantage_step(algorithm, estimator).step]


def num_learnable_tokens(batch: DataProtoFuture) -> Tensor:
    """[B] int64: how many tokens of each row the response mask keeps.

    Only a mask of this process is read. One that lies elsewhere is the rollout's own, which keeps every token.
    """
    if not batch.is_here("response_mask"):
        return batch.lengths("response_mask")
    mask_N, offsets = parts(batch.get(keys=["response_mask"]).batch["response_mask"])
    return torch.zeros(len(batch), dtype=torch.int64).index_add_(0, row_ids(offsets), mask_N.bool().long())


def _kl_step(estimator: AdvantageEstimator) -> RowStep[...]:
    return token_reward_kl if estimator.level == "token" else reward_kl


def _advantage_step(algorithm: AlgorithmConfig, estimator: AdvantageEstimator) -> RowStep[...]:
    """The step with what the estimator and the KL penalty read, and the returns that the estimator gives."""
    of_tokens = ("response_mask",) if estimator.level == "token" else ()
    of_kl = _kl_step(estimator).writes if algorithm.use_kl_in_reward else ()
    returns = ("returns",) if estimator.gives_returns else ()
    return advantages.with_columns(reads=(*of_tokens, *of_kl, *estimator.reads), writes=returns)


def _at_last_token(scores_B: Tensor, mask_N: Tensor, offsets: Tensor) -> Tensor:
    """[N] float64: each row's reward at the last token that its mask keeps, 0 elsewhere."""
    rewards_N = torch.zeros(len(mask_N), dtype=torch.float64)
    kept = mask_N.bool().nonzero().flatten()
    last_B = torch.searchsorted(kept, offsets[1:]) - 1  # in `kept`, of the last token before the row's end
    has_token_B = (last_B >= 0) & (torch.searchsorted(kept, offsets[:-1]) <= last_B)
    rewards_N[kept[last_B[has_token_B]]] = scores_B[has_token_B]
    return rewards_N


def _plain(column: Tensor) -> Tensor:
    """The values of a jagged column end to end, or a dense one as it is."""
    return parts(column)[0] if is_jagged(column) else column


def _column(estimator: AdvantageEstimator, name: str, values: Tensor, rewards: Tensor, offsets: Tensor | None) -> Tensor:
    """What an estimator returned as a column, in float32. DataError unless it is a finite value for each row, or each token."""
    kind = type(estimator).__name__
    if values.shape != rewards.shape:
        raise DataError(
            f"{kind} must return {name} of shape {list(rewards.shape)}, one for each {estimator.level}, got {list(values.shape)}"
        )
    if not torch.isfinite(values).all():
        place = int((~torch.isfinite(values)).nonzero()[0])
        raise DataError(f"{kind} must return finite {name}, got {float(values[place])} for {estimator.level} {place}")
    return values.float() if offsets is None else jagged(values.float(), offsets)
