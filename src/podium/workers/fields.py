"""The columns of a step of RL: what each is. docs/data.md shows this table, with who makes and who reads each column.

Who makes and reads a column is stated where that happens: at a worker's method, a step of a trainer, a loss, an estimator.
"""

from __future__ import annotations

import torch

from podium.protocol import Field

OBJECTS: tuple[torch.dtype, ...] = ()
INT, BOOL = (torch.int64,), (torch.bool,)
FLOAT, DOUBLE = (torch.float32,), (torch.float64,)
MODEL_FLOAT = (torch.float32, torch.float64)
"""float32, but float64 for a model in float64."""
ROW, TOKENS = ("B",), ("B", "*")

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("prompts", INT, TOKENS, "tokens of the prompt"),
        Field("uid", OBJECTS, ROW, "str: names the prompt within the run"),
        Field("problem", OBJECTS, ROW, "`Problem`: what the response is verified by"),
        Field("responses", INT, TOKENS, "tokens drawn, the end of sequence or stop string included"),
        Field("input_ids", INT, TOKENS, "tokens of prompt and response"),
        Field("response_mask", INT, TOKENS, "1 for a token of `responses` that counts; all 0 once a row does not have a score"),
        Field(
            "rollout_log_probs", MODEL_FLOAT, TOKENS, "log-probs of `responses` as they were drawn, at the sampling's temperature"
        ),
        Field("sample_index", INT, ROW, "which of its prompt's samples the row is, from 0"),
        Field("weight_version", INT, ROW, "version of the weights that drew the row"),
        Field("finish_reason", OBJECTS, ROW, '"stop" (end of sequence or stop string) or "length"'),
        Field("response", OBJECTS, ROW, "str: text of `responses` without special tokens"),
        Field("rewards", FLOAT, ROW, "what the response is worth; NaN where scoring failed and the row is left out"),
        Field("is_scored", BOOL, ROW, "whether the row has a reward to learn from"),
        Field("ref_log_prob", MODEL_FLOAT, TOKENS, "log-probs of `responses` under the reference; only with a KL term"),
        Field("old_log_probs", MODEL_FLOAT, TOKENS, "log-probs of `responses` under the policy that the step began with"),
        Field(
            "reward_kl", DOUBLE, ROW, "KL from the reference, summed over the response; only with `algorithm.use_kl_in_reward`"
        ),
        Field("token_reward_kl", DOUBLE, TOKENS, "KL from the reference at each token; in its place, for an estimator of tokens"),
        Field(
            "advantages", FLOAT, ROW, "how much better than its baseline; [B, *], one for each token, of an estimator of tokens"
        ),
        Field("returns", FLOAT, ROW, "what a critic should have predicted; only of an estimator that gives them, shaped alike"),
        Field("mini_batch", INT, ("B", "epochs"), "in which mini-batch the row is, per epoch"),
    )
}
"""By name, in the order in which a step makes them."""
