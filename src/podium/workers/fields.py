"""The columns of a step of RL: what each is, who makes it, who reads it. docs/data.md shows this table.

It stands here because it names methods of workers beside steps of trainers: workers are the lowest package that has either.
`podium.protocol` knows the form of such a table only, and `podium.algorithms` reads columns whoever made them.
"""

from __future__ import annotations

import torch

from podium.protocol import Field

OBJECTS: tuple[torch.dtype, ...] = ()
INT = (torch.int64,)
MODEL_FLOAT = (torch.float32, torch.float64)
"""float32, but float64 for a model in float64."""
ROW, TOKENS = ("B",), ("B", "*")

_GENERATE, _OLD, _REF, _UPDATE = "generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor"

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("prompts", INT, TOKENS, ("rollout",), (_GENERATE,), "tokens of the prompt"),
        Field("uid", OBJECTS, ROW, ("rollout",), (_GENERATE, "advantages", "log"), "str: names the prompt within the run"),
        Field("problem", OBJECTS, ROW, ("rollout",), ("score", "log"), "`Problem`: what the response is verified by"),
        Field(
            "responses",
            INT,
            TOKENS,
            (_GENERATE,),
            (_REF, _OLD, "advantages", _UPDATE, "log"),
            "tokens drawn, the end of sequence or stop string included",
        ),
        Field("input_ids", INT, TOKENS, (_GENERATE,), (_REF, _OLD, _UPDATE, "log"), "tokens of prompt and response"),
        Field(
            "response_mask",
            INT,
            TOKENS,
            (_GENERATE, "advantages"),
            ("advantages", _UPDATE),
            "1 for a token of `responses` that counts; all 0 once a row has no score",
        ),
        Field(
            "rollout_log_probs",
            MODEL_FLOAT,
            TOKENS,
            (_GENERATE,),
            ("log_probs", _OLD),
            "log-probs of `responses` as they were drawn, at the sampling's temperature",
        ),
        Field("sample_index", INT, ROW, (_GENERATE,), ("log",), "which of its prompt's samples the row is, from 0"),
        Field("weight_version", INT, ROW, (_GENERATE,), ("log",), "version of the weights that drew the row"),
        Field("finish_reason", OBJECTS, ROW, (_GENERATE,), ("log",), '"stop" (end of sequence or stop string) or "length"'),
        Field("response", OBJECTS, ROW, (_GENERATE,), ("score", "log"), "str: text of `responses` without special tokens"),
        Field(
            "rewards",
            (torch.float32,),
            ROW,
            ("score",),
            ("advantages", "log"),
            "what the response is worth; NaN where scoring failed and the row is left out",
        ),
        Field("is_scored", (torch.bool,), ROW, ("score",), ("advantages", "log"), "whether the row has a reward to learn from"),
        Field(
            "ref_log_prob",
            MODEL_FLOAT,
            TOKENS,
            (_REF,),
            ("advantages", _UPDATE),
            "log-probs of `responses` under the reference; only with a KL term",
        ),
        Field(
            "old_log_probs",
            MODEL_FLOAT,
            TOKENS,
            (_OLD, "log_probs"),
            ("advantages", _UPDATE),
            "log-probs of `responses` under the policy that the step began with",
        ),
        Field(
            "reward_kl",
            (torch.float64,),
            ROW,
            ("advantages",),
            ("advantages",),
            "KL from the reference, summed over the response; only with `algorithm.use_kl_in_reward`",
        ),
        Field(
            "advantages",
            (torch.float32,),
            ROW,
            ("advantages",),
            (_UPDATE, "log"),
            "how much better than its baseline, for all tokens of `responses`; a loss also takes one for each, [B, *]",
        ),
        Field("mini_batch", INT, ("B", "epochs"), ("advantages",), (_UPDATE,), "in which mini-batch the row is, per epoch"),
    )
}
"""By name, in the order in which a step makes them."""
