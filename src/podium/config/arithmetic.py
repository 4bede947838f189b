"""The arithmetic of a run: how prompts become rows, mini-batches and optimizer steps.

`explain` says it in words; `check` refuses what cannot work, with the arithmetic shown, before anything starts.
"""

from __future__ import annotations

from podium.config.base import Settings
from podium.config.parts import PartSettings, part_sections
from podium.config.reading import write_value
from podium.config.schema import ProfilerConfig, RunConfig
from podium.errors import ConfigError
from podium.parts import PartTable
from podium.runtimes import Capability, capabilities_of, runtimes_with


def rows_per_step(config: RunConfig) -> int:
    """Responses that one step generates and learns from."""
    return config.trainer.prompts_per_step * config.rollout.sampling.n


def optimizer_steps_per_step(config: RunConfig) -> int:
    """Optimizer steps in one step of the trainer: mini-batches times epochs."""
    return config.trainer.prompts_per_step // config.mini_batch_prompts * config.actor.epochs


def total_optimizer_steps(config: RunConfig) -> int:
    """Optimizer steps of the whole RL phase; the learning-rate schedule ends there."""
    return config.trainer.total_steps * optimizer_steps_per_step(config)


def explain(config: RunConfig) -> list[str]:
    """The arithmetic, a line each."""
    trainer, actor, sampling = config.trainer, config.actor, config.rollout.sampling
    mini_rows = config.mini_batch_prompts * sampling.n
    steps_each = optimizer_steps_per_step(config)
    prompts = trainer.total_steps * trainer.prompts_per_step
    lines = [
        f"{config.num_workers} worker(s) on runtime {config.runtime_name}, {_threads(config)}",
        *_placement(config),
        f"{trainer.prompts_per_step} prompts x {sampling.n} samples = {rows_per_step(config)} rows per step",
        f"{trainer.prompts_per_step} prompts / {config.mini_batch_prompts} prompts per mini-batch x {actor.epochs} epoch(s) = "
        f"{steps_each} optimizer steps per step",
        f"{config.mini_batch_prompts} prompts x {sampling.n} samples = {mini_rows} rows per optimizer step, "
        f"{-(-mini_rows // config.num_workers)} per rank",
        f"micro-batches of at most {actor.engine.max_tokens_per_micro_batch} tokens per rank, as many as the rows need",
        f"{trainer.total_steps} steps x {steps_each} = {total_optimizer_steps(config)} optimizer steps in all",
        f"{trainer.total_steps} steps x {trainer.prompts_per_step} prompts = {prompts} prompts{_epochs(config, prompts)}",
    ]
    if dtype := actor.engine.compute_dtype:
        kept = config.model.dtype
        lines.append(f"passes of warm-up, actor and reference in {dtype}; parameters, gradient sums and optimizer in {kept}")
    lines += [*_terms(config), *_profile(config), _parts(config)]
    if config.warmup.steps:
        lines.insert(0, f"warm-up: {config.warmup.steps} optimizer steps x {config.warmup.batch_rows} rows")
    return lines


def _parts(config: RunConfig) -> str:
    """Which parts were chosen, and where each is defined."""
    return "parts: " + ", ".join(f"{path} {part.name} ({_place(table, part)})" for path, table, part in part_sections(config))


def _place(table: PartTable, part: PartSettings) -> str:
    source = part.source
    return table.place_of(part.name) if source is None else f"{source.path}, sha256 {source.sha256[:12]}"


def _placement(config: RunConfig) -> list[str]:
    """Where the ranks go. The nodes are known only when the run starts."""
    if not capabilities_of(config.runtime_name).own_processes:
        return []
    gpus = {None: "a GPU each, if the cluster has any", True: "a GPU each", False: "no GPU"}[config.use_gpu]
    return [f"{config.num_workers} ranks / {config.nodes} node(s) = {config.ranks_per_node} ranks on each node, {gpus}"]


def _threads(config: RunConfig) -> str:
    """How many threads a rank gets. The size of the model is not known here."""
    if config.threads_per_rank:
        return f"{config.threads_per_rank} torch thread(s) each"
    return "torch threads: cores of a node / its ranks, or 1 each for a model below 5 M parameters (threads_per_rank=0)"


def _epochs(config: RunConfig, prompts: int) -> str:
    """How often each training problem is used. The number of rows in files is not known here."""
    num_train = config.task.num_train
    return f", {prompts / num_train:.2f} epochs of {num_train} training problems" if num_train is not None else ""


def _terms(config: RunConfig) -> list[str]:
    """The terms of the loss and the reward besides the surrogate and the verifier's number."""
    actor, algorithm, lines = config.actor, config.algorithm, []
    if actor.use_kl_loss:
        lines.append(f"loss + {actor.kl_loss_coef} x KL from the reference ({actor.kl_loss_type})")
    if actor.entropy_coeff:
        lines.append(f"loss - {actor.entropy_coeff} x entropy")
    if algorithm.use_kl_in_reward:
        lines.append(f"reward - {algorithm.kl_coef} x KL from the reference, summed over the response ({algorithm.kl_penalty})")
    if actor.drop_zero_advantage and (actor.use_kl_loss or actor.entropy_coeff):
        lines.append("rows of zero advantage are computed in spite of actor.drop_zero_advantage: KL or entropy concern them")
    return lines


def _unfit_ranks(config: RunConfig) -> list[str]:
    """Why the ranks cannot be placed or started with these settings."""
    reasons = []
    if config.num_workers % config.nodes:
        lower = config.num_workers - config.num_workers % config.nodes
        reasons.append(
            f"num_workers must be a multiple of nodes: {config.num_workers} / {config.nodes} leaves "
            f"{config.num_workers % config.nodes} ranks over; use num_workers={lower or config.nodes}"
        )
    runtime, can = config.runtime_name, capabilities_of(config.runtime_name)
    if config.num_workers > 1 and not can.collectives:
        able = _runtimes_with("collectives")
        reasons.append(f"runtime={runtime} has one process, num_workers={config.num_workers} needs collectives: use {able}")
    if config.worker_env and not can.worker_env:
        names = ", ".join(config.worker_env)
        reasons.append(
            f"worker_env ({names}) needs processes of the ranks' own, and runtime={runtime} runs the rank in the driver's: use "
            f"{_runtimes_with('worker_env')}, or set the variables in the shell that starts podium"
        )
    return reasons


def _runtimes_with(capability: Capability) -> str:
    return " or ".join(f"runtime={name}" for name in runtimes_with(capability))


def _unfit_terms(config: RunConfig) -> list[str]:
    """Why the terms of the loss and the reward do not fit together."""
    actor, reasons = config.actor, []
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        longest = config.rollout.sampling.max_new_tokens
        reasons.append(
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by actor.loss_scale_factor, which is not set; Dr.GRPO takes "
            f"the longest response: actor.loss_scale_factor={longest}"
        )
    if actor.loss_agg_mode != "seq-mean-token-sum-norm" and actor.loss_scale_factor is not None:
        reasons.append(
            f"actor.loss_scale_factor={actor.loss_scale_factor} is for actor.loss_agg_mode=seq-mean-token-sum-norm and means "
            f"nothing in {actor.loss_agg_mode}; use actor.loss_scale_factor=null"
        )
    return reasons


def _without_effect(config: RunConfig) -> list[str]:
    """Settings that were changed while the feature that reads them is off. To ignore them in silence would mislead."""
    actor, algorithm, reward = config.actor, config.algorithm, config.reward
    kl_loss, kl_reward = "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
    profiler = tuple(name for name in ProfilerConfig.model_fields if name != "tool")
    can = capabilities_of(config.runtime_name)
    switches: list[tuple[str, Settings, tuple[str, ...], bool, str]] = [
        ("actor", actor, ("kl_loss_coef", "kl_loss_type"), actor.use_kl_loss, kl_loss),
        ("algorithm", algorithm, ("kl_coef", "kl_penalty"), algorithm.use_kl_in_reward, kl_reward),
        ("reward", reward, ("failure_value",), reward.on_failure == "value", "reward.on_failure=value"),
        ("profiler", config.profiler, profiler, config.profiler.tool != "none", "a profiler.tool"),
        ("", config, ("nodes",), can.nodes, _runtimes_with("nodes")),
        ("", config, ("call_timeout_s", "start_timeout_s"), can.timeouts, _runtimes_with("timeouts")),
    ]
    reasons = []
    for section, settings, fields, is_on, switch in switches:
        for field in fields:
            value, default = getattr(settings, field), type(settings).model_fields[field].default
            if not is_on and value != default:
                name = f"{section}.{field}".lstrip(".")
                given, usual = write_value(value), write_value(default)
                reasons.append(f"{name}={given} has no effect without {switch}: set that, or leave {name} at {usual}")
    return reasons


def _unfit_profile(config: RunConfig) -> list[str]:
    """Why the profiler would record nothing, or less than the settings ask for."""
    profiler, reasons = config.profiler, []
    late = [step for step in profiler.steps if step > config.trainer.total_steps]
    absent = [rank for rank in profiler.ranks if rank >= config.num_workers]
    if late:
        reasons.append(f"profiler.steps has {late[0]}, but trainer.total_steps is {config.trainer.total_steps}")
    if absent:
        reasons.append(f"profiler.ranks has {absent[0]}, but num_workers is {config.num_workers}: ranks count from 0")
    if profiler.all_ranks and profiler.ranks:
        reasons.append("profiler.all_ranks=true and profiler.ranks contradict each other: use one")
    if profiler.tool != "none" and not profiler.steps:
        reasons.append(f"profiler.tool={profiler.tool} records nothing without profiler.steps: set them, such as [3]")
    return reasons


def _profile(config: RunConfig) -> list[str]:
    profiler = config.profiler
    if profiler.tool == "none":
        return []
    steps = ", ".join(map(str, profiler.steps))
    ranks = "all ranks" if profiler.all_ranks else f"rank {', '.join(map(str, profiler.ranks or (0,)))}"
    return [f"profiled by {profiler.tool}: step {steps} on {ranks}, into {profiler.save_path}/"]


def _unfit_dtype(config: RunConfig) -> list[str]:
    """A bfloat16 number has 8 significant bits, so AdamW's step of about lr is lost wherever it is below 2^-9 of the weight.
    After 50 steps at lr 1e-6, 2.6 % of the intended change had arrived in the weights."""
    if config.model.dtype != "bfloat16":
        return []
    return [
        "model.dtype=bfloat16 cannot be trained: its 8 significant bits lose updates below 1/512 of the weight, which is nearly "
        f"every update at RL's learning rates (actor.optim.lr={config.actor.optim.lr:g}). Use model.dtype=float32, with "
        "actor.engine.compute_dtype=bfloat16 to compute in bfloat16 (mixed precision)"
    ]


def check(config: RunConfig, *, is_trained: bool = True) -> None:
    """ConfigError when the sizes cannot work together; the message has every reason, with its arithmetic.

    is_trained: False where the model is only evaluated.
    """
    trainer, actor, sampling = config.trainer, config.actor, config.rollout.sampling
    reasons = []
    if trainer.prompts_per_step % config.mini_batch_prompts:
        reasons.append(
            f"trainer.prompts_per_step must be a multiple of actor.mini_batch_prompts: {trainer.prompts_per_step} / "
            f"{config.mini_batch_prompts} leaves {trainer.prompts_per_step % config.mini_batch_prompts} prompts over"
        )
    if config.task.num_train is not None and trainer.prompts_per_step > config.task.num_train:
        reasons.append(
            f"trainer.prompts_per_step ({trainer.prompts_per_step}) is more than task.num_train ({config.task.num_train}): "
            "a step would hold a prompt twice"
        )
    if sampling.max_new_tokens >= actor.engine.max_tokens_per_micro_batch:
        reasons.append(
            f"a response of rollout.sampling.max_new_tokens ({sampling.max_new_tokens}) tokens and its prompt do not fit into "
            f"actor.engine.max_tokens_per_micro_batch ({actor.engine.max_tokens_per_micro_batch})"
        )
    if sampling.top_k == 1:
        reasons.append(
            "rollout.sampling.top_k is 1: the samples of a prompt are all equal and teach nothing; use 0 (off) or more"
        )
    if sampling.temperature == 0:
        reasons.append("rollout.sampling.temperature is 0: greedy samples of a prompt are all equal and teach nothing; use 1.0")
    reasons += _unfit_ranks(config)
    reasons += _unfit_terms(config) + _unfit_profile(config) + _without_effect(config)
    reasons += _unfit_dtype(config) if is_trained else []
    if reasons:
        raise ConfigError("\n".join(reasons))
