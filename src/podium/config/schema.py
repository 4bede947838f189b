"""Every setting of a run, its type, its default and its unit: the one source of truth.

Models are frozen and strict, and an unknown key is an error. Batch sizes say their unit (prompts, rows or tokens); unless a
name says "per rank" they are global. What is not here: how a section that names a part finds the part's settings class
(`parts`), reading YAML and overrides (`load`), and checks that need more than one section (`arithmetic`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from podium.config.base import Decay, Fraction, Json, KLKind, Paths, Positive, Scalar, Settings, Unbounded, as_tuple
from podium.config.parts import SOURCES, PartOf, PartSettings, SourcedSettings
from podium.errors import ConfigError, unknown_name
from podium.parts import ADVANTAGE_ESTIMATORS, ENGINES, POLICY_LOSSES, REWARDS, ROLLOUTS, TASKS, TRACKERS, TRAINERS
from podium.runtimes import CAPABILITIES, runtime_for


def _not_float16(value: Any) -> Any:
    if value == "float16":
        raise ValueError("float16 needs a scaled loss, or gradients below 6e-8 become 0, and losses are not scaled; use bfloat16")
    return value


def _known_tool(value: Any) -> Any:
    if value in ("npu", "precision_debugger"):
        raise ValueError(f"{value} is for devices that Podium does not run on; the tools are torch, torch_memory, nsys, none")
    return value


def _known_runtime(value: str) -> str:
    if value not in ("auto", *CAPABILITIES):
        raise ValueError(unknown_name("runtime", value, ["auto", *CAPABILITIES]))
    return value


def _in_float32(value: float) -> float:
    if abs(value) > 3.4e38:
        raise ValueError(f"is infinite in float32, in which rewards are kept: use a number of at most 3.4e38, got {value}")
    return value


def _texts(value: Any) -> Any:
    """Whole numbers, as YAML reads `1`, are meant as text."""
    if not isinstance(value, dict):
        return value
    return {name: str(item) if type(item) is int else item for name, item in value.items()}


def _checked_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as exc:
        raise ValueError(f"is not a regular expression: {exc}") from exc
    if not groups:
        raise ValueError("needs a group in parentheses: what the groups match is the prompt")
    return pattern


class ModelConfig(Settings):
    """Which causal language model is trained."""

    path: str
    """A folder or hub id that transformers loads, or the name of a built-in architecture (`char_llama`) made from its config."""
    override_config: dict[str, Scalar] = {}
    """Attributes of the model's config to change, e.g. `{hidden_size: 96}`."""
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], BeforeValidator(_not_float16)] = "float32"
    """dtype of the parameters, whatever they are saved in. A model that is trained cannot be `bfloat16`: its optimizer would
    round small updates away. Set `actor.engine.compute_dtype` to compute in bfloat16."""
    trust_remote_code: bool = False
    """Passed to transformers; runs code that comes with the model."""

    def moved_to(self, path: str) -> ModelConfig:
        """The same model, saved at another path, where its config already has the overrides."""
        return self.model_copy(update={"path": path, "override_config": {}})


class TaskConfig(PartSettings):
    """What is asked: a dataset of reasoning-gym by its `name`, your own files, or your own task. Exactly one of the three."""

    name: str = "files"
    """reasoning-gym's name of a dataset; `files`, or null, where `train_files` is set; or your own class or function, as
    `package.module:Name` or `path/to/file.py:Name`."""
    params: dict[str, Scalar] = {}
    """Options of that dataset, e.g. `{min_word_len: 3}`."""
    prompt_pattern: Annotated[str, AfterValidator(_checked_pattern)] | None = None
    """A regular expression that is searched in the question. Its groups, with a space between them, are the prompt.
    null: the whole question."""
    few_shot: Annotated[int, Field(ge=0)] = 0
    """Solved examples before each question, a line each, the same for all and in no split. The question is the last line."""
    train_files: Paths = ()
    """JSONL or parquet files of training rows, in verl's columns or plain `prompt` and `answer`; see docs/tasks.md."""
    validation_files: Paths = ()
    """The same for validation; without any, rows are split off the training rows."""
    held_out_files: Paths = ()
    """The same for held-out rows."""
    bad_rows: Literal["raise", "drop"] = "raise"
    """What to do about rows of files that do not fit: stop and list them, or leave them out with a warning and their count."""
    max_prompt_tokens: Positive | None = None
    """A row of a file whose prompt has more tokens (chat template included) does not fit; null: any length."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto`: a text prompt is one user message where the tokenizer has a chat template, and plain text otherwise;
    `always`: a tokenizer without one is an error; `never`: plain text, also of messages (their contents, an empty line between
    them)."""
    num_train: Positive | None = None
    """Training problems; each epoch goes through all of them once. null: 4096 of reasoning-gym, all rows of files."""
    num_validation: Positive | None = None
    """Problems that may steer the run. null: 128 of reasoning-gym; all rows of validation files; at most 128, and a tenth, where
    they are split off the training rows."""
    num_held_out: Positive | None = None
    """Problems read only to report, before and after. null: as for validation, with 256."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the problems: the same seed gives the same three splits."""

    @property
    def has_files(self) -> bool:
        """Whether the task is rows of files."""
        return self.name == "files"

    @model_validator(mode="after")
    def _check_kind(self) -> TaskConfig:
        if self.has_files == (not self.train_files):
            found = "neither" if self.has_files else "both"
            raise ValueError(
                f"a task is either a dataset of reasoning-gym (task.name) or your own rows (task.train_files), got {found}"
            )
        own = {"params": self.params, "prompt_pattern": self.prompt_pattern, "few_shot": self.few_shot}
        of_files = {
            "validation_files": self.validation_files,
            "held_out_files": self.held_out_files,
            "max_prompt_tokens": self.max_prompt_tokens,
            "bad_rows": self.bad_rows != "raise",
        }
        is_outside = ":" in self.name or "." in self.name
        wrong = {**of_files, **own} if is_outside else own if self.has_files else of_files
        unfit = sorted(key for key, value in wrong.items() if value)
        if unfit:
            kind = "task.name (a dataset of reasoning-gym)" if any(key in own for key in unfit) else "task.train_files"
            raise ValueError(f"{', '.join(f'task.{key}' for key in unfit)}: only for a task with {kind}")
        return self


class RewardConfig(SourcedSettings):
    """How responses are scored. Without a function: the dataset's own verifier, or for files exact match with the answer."""

    function: str | None = None
    """Your function, as `path/to/file.py:function` or `package.module.function`; verl's signature, see docs/tasks.md."""
    kwargs: dict[str, Json] = {}
    """Further keyword arguments of the function."""
    num_workers: Positive | None = None
    """Processes on the driver's machine that score at the same time, each one response at a time; null: as many as it has cores,
    at least 2 and at most 32."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Most seconds for one response; a process that takes longer is killed and replaced, and the response counts as failed."""
    max_retries: Annotated[int, Field(ge=0)] = 0
    """How often a response whose scoring failed, for whatever reason, is scored again before it counts as failed."""
    on_failure: Literal["raise", "drop", "value"] = "raise"
    """A response whose scoring failed: stop the run, leave the response out of the update, or give it `failure_value`."""
    failure_value: Annotated[float, Field(allow_inf_nan=False), AfterValidator(_in_float32)] = 0.0
    """The reward of a failed response under `on_failure: value`; as any reward, finite in float32."""

    @model_validator(mode="after")
    def _check_function(self) -> RewardConfig:
        if self.kwargs and self.function is None:
            raise ValueError("reward.kwargs are arguments of reward.function, which is not set")
        parts = (self.function or "a.b").rpartition(":" if ":" in (self.function or "") else ".")
        if not all(parts) or (parts[1] == "." and parts[2] == "py"):
            raise ValueError(
                f"reward.function must be path/to/file.py:function or package.module.function, got {self.function!r}"
            )
        return self

    @model_validator(mode="after")
    def _keep_file(self, info: ValidationInfo) -> RewardConfig:
        """A file that is missing is an error of the preflight, which imports the function in a process of its own."""
        if self.function is not None and self._source is None:
            with suppress(ConfigError):
                self._source = REWARDS.source_of(self.function, (info.context or {}).get(SOURCES))
        return self


class OptimConfig(Settings):
    """AdamW, its schedule and clipping."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(as_tuple)] = (0.9, 0.999)
    """AdamW's betas."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[Unbounded, Field(gt=0)] = 1.0
    """Largest global gradient norm (L2); `inf` clips nothing."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; decays until the last optimizer step of the run."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of `lr`."""


class EngineConfig(PartSettings):
    """How a model is trained: the backend, and the settings that all backends share. A backend's own are in a subclass."""

    name: str = "fsdp2"
    """Training engine: `fsdp2`, `package.module:Name` or `path/to/file.py:Name`."""
    max_tokens_per_micro_batch: Positive = 16384
    """Most tokens (padding included) in one forward pass of a rank; a longer row is an error."""
    compute_dtype: Annotated[Literal["bfloat16"] | None, BeforeValidator(_not_float16)] = None
    """dtype of forward and backward passes: `bfloat16` is mixed precision, with parameters, summed gradients and optimizer in
    `model.dtype`; null: that dtype throughout. Log-probs, entropies and losses are computed from the logits in float32."""


class FSDP2Config(EngineConfig):
    """The settings of the engine `fsdp2`."""

    layout: Literal["auto", "bucketed", "packed", "shared"] = "auto"
    """`bucketed`: rows of like length side by side; `packed`: rows end to end; `shared`: the samples of a prompt behind it, so
    that it is computed once; `auto`: whichever is estimated to cost least. The numbers are the same."""


class SamplingConfig(Settings):
    """How tokens are drawn."""

    max_new_tokens: Positive = 128
    """Most tokens of a response, the end-of-sequence token included."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus: keep the smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0 is off."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)] = ()
    """A response ends once its text contains one of these strings (the text stays in the response). The text is that without
    special tokens; a string that is the name of a special token ends the response at that token too."""
    n: Positive = 8
    """Samples per prompt, which an advantage estimator of groups compares."""


class RolloutConfig(PartSettings):
    """How responses are generated: the engine, and the settings that all engines share. An engine's own are in a subclass."""

    name: str = "hf"
    """Rollout engine: `hf`, `package.module:Name` or `path/to/file.py:Name`."""
    sampling: SamplingConfig = SamplingConfig()
    """How training responses are drawn."""


class HFRolloutConfig(RolloutConfig):
    """The settings of the rollout engine `hf`."""

    max_rows: Positive = 1024
    """Most responses that a rank decodes at once; more are done one batch after another."""


class PolicyLossConfig(PartSettings):
    """The policy loss of each token, before aggregation, KL term and entropy bonus. A loss's own settings are in a subclass."""

    name: str = "ppo_clip"
    """Policy loss: `ppo_clip`, `reinforce`, `package.module:Name` or `path/to/file.py:Name`."""


class PPOClipConfig(PolicyLossConfig):
    """The settings of the policy loss `ppo_clip`."""

    clip_low: Annotated[Unbounded, Field(ge=0)] = 0.2
    """The probability ratio is clipped below at 1 - this; `inf` clips nothing."""
    clip_high: Annotated[Unbounded, Field(ge=0)] = 0.2
    """The probability ratio is clipped above at 1 + this; `inf` clips nothing."""
    clip_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: where the advantage is negative, a ratio above this counts as this (verl's default is 3.0); null is off."""


class ActorConfig(Settings):
    """How the policy is updated."""

    optim: OptimConfig
    """The policy's optimizer."""
    engine: Annotated[EngineConfig, PartOf(ENGINES)] = FSDP2Config()
    """The policy's engine."""
    mini_batch_prompts: Positive | None = None
    """Prompts, with all their samples, per optimizer step; null: all of `trainer.prompts_per_step`."""
    epochs: Positive = 1
    """Passes over each step's rollouts."""
    loss: Annotated[PolicyLossConfig, PartOf(POLICY_LOSSES)] = PPOClipConfig()
    """The policy loss of each token; a string alone is its name."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number."""
    loss_scale_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Constant divisor of a row's sum in `seq-mean-token-sum-norm`, which requires it (Dr.GRPO: the longest response)."""
    entropy_coeff: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Times the mean entropy of the policy, subtracted from the loss."""
    calculate_entropy: bool = False
    """Report the entropy also where it is not in the loss."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.001
    """Times the KL divergence in the loss; 0 only reports it."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the KL divergence in the loss; a `+` takes the gradient of k2 with the value of the name."""
    dropout: bool = False
    """Keep the model's own training noise in updates: dropout of every kind, layer drop, jitter of a router. Off, the policy that
    is updated is exactly the one that was sampled, and the first ratio of a step is 1."""
    drop_zero_advantage: bool = False
    """Do not compute rows of zero advantage, whose gradient is zero as long as there is neither a KL term nor an entropy bonus;
    with either, they are computed. They always count in the denominator."""
    recompute_old_log_probs: bool = True
    """Old log-probs by the trainer's own forward pass; otherwise the rollout's."""


class AdvantageConfig(PartSettings):
    """How rewards become advantages. An estimator's own settings are in a subclass."""

    name: str = "grpo"
    """Advantage estimator: `grpo`, `rloo`, `package.module:Name` or `path/to/file.py:Name`."""


class GRPOConfig(AdvantageConfig):
    """The settings of the advantage estimator `grpo`."""

    norm_by_std: bool = True
    """Divide the centred rewards of a group by their standard deviation; false: Dr.GRPO."""


class AlgorithmConfig(Settings):
    """How rewards become advantages."""

    adv_estimator: Annotated[AdvantageConfig, PartOf(ADVANTAGE_ESTIMATORS)] = GRPOConfig()
    """Advantage estimator; a string alone is its name."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence of each response's tokens from the reference model from its reward, before the baseline."""
    kl_penalty: KLKind = "kl"
    """Estimator of the KL divergence in the reward; a `+` makes no difference, there is no gradient."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.001
    """Times the KL divergence in the reward."""


class RefConfig(Settings):
    """The reference model of `actor.use_kl_loss` and `algorithm.use_kl_in_reward`. Its engine has the actor's settings."""

    model: str | None = None
    """Folder or hub id; null: the model that RL starts from."""


class WarmupConfig(Settings):
    """Supervised fine-tuning before RL, to make a small model that has the skill in a mixture."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0 skips the warm-up."""
    batch_rows: Positive = 64
    """Rows per optimizer step."""
    targets: dict[Literal["answer", "copy"], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {"answer": 1.0}
    """What the response is, as a mixture of weights: the right answer, or a copy of the prompt's text."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """The warm-up's optimizer."""
    dropout: bool = True
    """Keep the model's own training noise, as supervised training does; see `actor.dropout`."""


class TrackerConfig(PartSettings):
    """A tracker. Its own settings are in a subclass."""

    name: str
    """`tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, `package.module:Name` or `path/to/file.py:Name`."""


class TrainerConfig(PartSettings):
    """The driver's loop. A trainer's own settings are in a subclass."""

    name: str = "ppo"
    """Trainer: `ppo`, `package.module:Name` or `path/to/file.py:Name`."""
    total_steps: Positive
    """Steps of RL: one rollout and one pass of updates each."""
    prompts_per_step: Positive
    """Prompts per step; rows are this times `rollout.sampling.n`."""
    val_freq: Annotated[int, Field(ge=0)] = 10
    """Validate every so many steps, and before the first and after the last; 0 is never."""
    save_freq: Annotated[int, Field(ge=0)] = 10
    """Save a checkpoint every so many steps, besides those of step 0 and of the last; 0 is only these two. The warm-up does not
    ask: it saves every 200 steps and after its last."""
    keep_checkpoints: Positive = 2
    """How many of the newest complete checkpoints stay."""
    samples_per_step: Annotated[int, Field(ge=0)] = 4
    """Responses written to `samples.jsonl` each step."""
    trackers: Annotated[tuple[Annotated[TrackerConfig, PartOf(TRACKERS)], ...], BeforeValidator(as_tuple)] = (
        TrackerConfig(name="tensorboard"),
    )
    """Where metrics and samples go besides the run directory, e.g. `[tensorboard, {name: wandb, project: x}]`; `[]` for nowhere.
    The warm-up is logged there too."""
    curve: bool = True
    """Draw `curve.png` at the end (extra: plot)."""


class ProfilerConfig(Settings):
    """Recordings of single steps, one file a rank: `step-3-rank-0.json.gz`. Off unless a tool and steps are given."""

    tool: Annotated[Literal["none", "torch", "torch_memory", "nsys"], BeforeValidator(_known_tool)] = "none"
    """`torch`: a trace of operations for https://ui.perfetto.dev; `torch_memory`: allocations of GPU memory for
    https://pytorch.org/memory_viz; `nsys`: opens the capture of an `nsys profile` around the ranks (the latter two need CUDA)."""
    steps: Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)] = ()
    """The steps of RL that are recorded, from the end of the step before to their own."""
    all_ranks: bool = False
    """Record every rank."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_tuple)] = ()
    """Record these ranks; without any, and without `all_ranks`, rank 0."""
    save_path: str = "profile"
    """Folder of the recordings, in the run directory unless it is absolute; on the rank's own node."""
    tool_config: dict[str, Json] = {}
    """The tool's own options: of `torch` record_shapes, profile_memory, with_stack, with_flops, with_modules (true or false); of
    `torch_memory` max_entries."""
    finish_command: str | None = None
    """Run by `sh` on each recorded rank, in `save_path`, once the last of the steps is written; PODIUM_PROFILE_SAVE_PATH, _TOOL,
    _RANK, _PID and _ROLE are set. Where it fails, the log says so and the run goes on."""


class RunConfig(Settings):
    """A whole run: `podium train` takes one, and the run directory keeps it as `config.yaml`."""

    name: str
    """First part of the run directory's name."""
    description: str = ""
    """What the recipe shows and how long it takes, for `podium recipes`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root of every random stream of the run, as torch takes it."""
    runtime: Annotated[str, AfterValidator(_known_runtime)] = "auto"
    """Where workers live: in this process, or as Ray actors; `auto` is inline for one worker and ray for more."""
    num_workers: Positive = 1
    """Ranks, on all nodes together."""
    nodes: Positive = 1
    """Machines of the Ray cluster that the ranks are spread over, `num_workers / nodes` on each; see docs/clusters.md."""
    use_gpu: bool | None = None
    """Whether each rank takes a GPU of its own; null: wherever there are any."""
    start_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most seconds until the ranks have their places and processes, before they load models; null: 120, or one for each rank
    where that is more. On ray; inline starts nothing."""
    worker_env: Annotated[dict[str, str], BeforeValidator(_texts)] = {}
    """Environment variables of the ranks' processes, e.g. `{NCCL_DEBUG: INFO}`. On ray; inline has the driver's own process."""
    threads_per_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """torch threads of each rank; 0 is 1 for a model below 5 M parameters, whose threads would mostly wait for each other where
    other programs use the cores too, and else the cores of the rank's node divided by the ranks there."""
    call_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    """Most seconds of any single call of the workers (a step's rollout, its updates, a checkpoint, an evaluation), and of
    building them; a call that takes longer ends the run. On ray; inline knows no limit."""
    run_root: str = "runs"
    """Folder of the run directories."""
    model: ModelConfig
    """The model; a string alone is its path."""
    task: Annotated[TaskConfig, PartOf(TASKS)]
    """The task."""
    reward: RewardConfig = RewardConfig()
    """The reward."""
    warmup: WarmupConfig = WarmupConfig()
    """Supervised warm-up before RL."""
    actor: ActorConfig
    """The policy's updates."""
    rollout: Annotated[RolloutConfig, PartOf(ROLLOUTS)] = HFRolloutConfig()
    """Generation."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages."""
    ref: RefConfig = RefConfig()
    """The reference model."""
    trainer: Annotated[TrainerConfig, PartOf(TRAINERS)]
    """The loop."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Recordings of single steps."""

    @property
    def runtime_name(self) -> str:
        """`runtime` with `auto` resolved."""
        return self.runtime if self.runtime != "auto" else runtime_for(self.num_workers)

    @property
    def ranks_per_node(self) -> int:
        """`num_workers / nodes`, which `check` demands to be whole."""
        return self.num_workers // self.nodes

    @property
    def mini_batch_prompts(self) -> int:
        """`actor.mini_batch_prompts` with null resolved."""
        return self.actor.mini_batch_prompts or self.trainer.prompts_per_step

    @model_validator(mode="after")
    def _check_name(self) -> RunConfig:
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"name is part of a folder's name: letters, digits, '-' and '_' only, got {self.name!r}")
        return self
