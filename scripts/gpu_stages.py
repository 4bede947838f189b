"""The stages of gpu_check: short functions over Podium's public API, in order of worth.

On a CPU they run the same code with small models and compare the CPU with itself; a figure that only a GPU has says so.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers as tf
import yaml
from gpu_parts import (
    GIB,
    HALF_BILLION,
    LARGE_VOCABULARY,
    LAYOUTS,
    NEEDS_CUDA,
    ONE_AND_A_HALF_BILLION,
    SMALL_VOCABULARY,
    TINY,
    Check,
    Layout,
    Skip,
    engine_of,
    float64_model,
    forget_peak,
    hash_of,
    largest_gap,
    log_probs,
    model_of,
    peak_gib,
    prompts_of,
    rollout_of,
    rows_of,
    timed,
    train,
    weights_of,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from podium.algorithms import KLTerm, Loss, PolicyLoss, PPOClip, SFTLoss
from podium.checkpoint import load_state, save_state
from podium.cli.main import app
from podium.config import PPOClipConfig, SamplingConfig
from podium.engines import pick_device
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import EngineError
from podium.protocol import DataProto
from podium.single_controller import Worker
from podium.single_controller.rank.context import RankContext, running_as

ROOT = Path(__file__).parents[1]
RAGGED = [(5, 9), (17, 3), (2, 12), (11, 1), (30, 20)]
"""(prompt, response) tokens of rows, each of which a batch has twice."""
LOSSES: dict[str, Loss] = {
    "sft": SFTLoss(),
    "policy": PolicyLoss(PPOClip(PPOClipConfig(clip_high=0.28))),
    "policy_kl_entropy": PolicyLoss(PPOClip(), entropy_coeff=0.01, kl=KLTerm(0.01, "low_var_kl")),
}
REWARD = "def variety(data_source, solution_str, ground_truth, **rest):\n    return len(set(solution_str)) / 6\n"
"""Differs between the samples of a prompt, also of a model that knows nothing."""
PASSES: tuple[tuple[int, int, Layout], ...] = (
    (2, 1, "bucketed"),
    (8, 1, "bucketed"),
    (8, 4, "bucketed"),
    (8, 8, "bucketed"),
    (8, 1, "packed"),
)
EXACT = 1e-9
"""Most by which two devices may differ in float64."""


def cpu_tests(check: Check) -> None:
    """(1) Podium's own tests on this machine's CPU: a failure here is one of versions and not of the GPU."""
    versions = {name: version(name) for name in ("torch", "transformers", "tensordict", "numpy")}
    check.figures(python=platform.python_version(), cuda=torch.version.cuda, **versions)
    if find_spec("pytest") is None:
        raise Skip("pytest is not installed: make venv installs it")
    tests = ["tests/algorithms/test_aggregation.py"] if check.is_small else ["tests/algorithms", "tests/engines", "tests/rollout"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    check.figures(result=done.stdout.strip().rpartition("\n")[2])
    check.require(done.returncode == 0, f"tests fail on the CPU: {done.stdout[-1000:]}")


def devices(check: Check) -> None:
    """(2) The device of a rank, a process group of one on it, and a LOCAL_RANK that is the number of no GPU here."""
    if check.is_cuda:
        check.figures(gpu=torch.cuda.get_device_name(check.device), gpus=torch.cuda.device_count())
        check.figures(memory_gib=torch.cuda.get_device_properties(check.device).total_memory / GIB)
    os.environ["LOCAL_RANK"] = "3"
    with running_as(RankContext(local_rank=3, device_index=0)):  # as a rank on Ray that sees its own GPU only
        device = pick_device()
        Worker().init_process_group()
    check.figures(device=str(device), backend=dist.get_backend_config())
    mesh = init_device_mesh(device.type, (1,))
    if check.is_cuda:
        check.require(device.index == torch.cuda.current_device() == 0, f"the current GPU is {torch.cuda.current_device()}")
    for where in {torch.device("cpu"), device}:
        total = torch.full((4,), 2.0, device=where)
        dist.all_reduce(total, group=mesh.get_group())
        check.require(total.tolist() == [2.0] * 4, f"an all_reduce of one rank on {where} gave {total.tolist()}")


def float64(check: Check) -> None:
    """(3) In float64 the device computes what the CPU does: four layouts, three losses, three steps."""
    model, batch = float64_model(), rows_of(RAGGED)
    before, norms, after = 0.0, 0.0, 0.0
    for loss in LOSSES.values():
        reference = engine_of(model, "cpu", layout="bucketed")
        expected = log_probs(reference, batch)
        expected_norms = train(reference, batch, loss, 3)
        expected_weights = weights_of(reference)
        for layout in LAYOUTS:
            engine = engine_of(model, check.device, layout=layout)
            before = max(before, float((log_probs(engine, batch) - expected).abs().max()))
            found = train(engine, batch, loss, 3)
            norms = max(norms, *(abs(mine - theirs) for mine, theirs in zip(found, expected_norms, strict=True)))
            after = max(after, largest_gap(weights_of(engine), expected_weights))
    check.within(EXACT, log_probs_gap=before, grad_norm_gap=norms, weights_gap=after)


def same_tokens(check: Check) -> None:
    """(4) In float64 the device draws the tokens that the CPU draws: greedy, top-k, top-p, stop strings, padded prompts."""
    kinds = {
        "plain": SamplingConfig(max_new_tokens=16, n=4),
        "greedy": SamplingConfig(max_new_tokens=16, n=1, temperature=0.0),
        "top_k": SamplingConfig(max_new_tokens=16, n=4, top_k=5, temperature=0.7),
        "top_p": SamplingConfig(max_new_tokens=16, n=4, top_p=0.8),
        "stop": SamplingConfig(max_new_tokens=16, n=4, stop=("7 ",)),
    }
    prompts, gap = prompts_of([3, 11, 1, 7]), 0.0
    here, there = (rollout_of(float64_model().to(device), max_rows=8) for device in ("cpu", check.device))
    for name, sampling in kinds.items():
        mine, theirs = (rollout.generate(prompts, sampling, seed=0, step=1) for rollout in (here, there))
        equal = tokens_of(mine) == tokens_of(theirs)
        check.figures(**{f"{name}_is_equal": equal})
        check.require(equal, f"{name}: other tokens than on the CPU")
        if equal:
            pairs = zip(*(rows.batch["rollout_log_probs"].unbind() for rows in (mine, theirs)), strict=True)
            gap = max([gap, *(float((a - b).abs().max()) for a, b in pairs)])
    check.within(EXACT, log_probs_gap=gap)


def tokens_of(rows: DataProto) -> list[list[int]]:
    return [row.tolist() for row in rows.batch["responses"].unbind()]


def bfloat16_layouts(check: Check) -> None:
    """(5) Which layouts the engine accepts in bfloat16 on a deep model, and how far their log-probs are from rows alone."""
    sizes = (TINY if check.is_small else HALF_BILLION) | {"num_hidden_layers": 28}
    model, batch = model_of(sizes, device=check.device), rows_of(RAGGED * (1 if check.is_small else 4))
    exact = log_probs(engine_of(model, check.device, layout="bucketed"), batch)
    expected = log_probs(engine_of(model, check.device, layout="bucketed", compute_dtype="bfloat16"), batch)
    check.figures(bucketed_to_float32=float((expected - exact).abs().max()))
    masked: tuple[Layout, ...] = ("packed", "shared")
    for layout in masked:
        engine = engine_of(model, check.device, layout=layout, compute_dtype="bfloat16")
        try:
            gap = float((log_probs(engine, batch) - expected).abs().max())
        except EngineError:
            check.figures(**{layout: "refused"})
        else:
            check.within(0.1, **{f"{layout}_gap": gap})


def same_bits(check: Check) -> None:
    """(6) Two equal updates, and one that is resumed between its steps, end in the same bits."""
    model, batch = model_of(TINY), rows_of(RAGGED)

    def trained(steps: int) -> FSDP2Engine:
        engine = engine_of(model, check.device)
        train(engine, batch, LOSSES["policy"], steps)
        return engine

    first, second, half = trained(4), trained(4), trained(2)
    resumed = engine_of(model, check.device)
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder) / "half", *half.state())
        resumed.load_state(*load_state(Path(folder) / "half"))
    train(resumed, batch, LOSSES["policy"], 2)
    names = {name: hash_of(engine.state()[0]) for name, engine in (("first", first), ("second", second), ("resumed", resumed))}
    check.figures(**names)
    check.require(names["first"] == names["second"], "two equal updates differ")
    check.require(names["first"] == names["resumed"], "a resumed update differs from one in a piece")


def sharded(check: Check) -> None:
    """(7) FSDP2 over a process group of one is the unsharded engine: train, clip, save, load, weights, peak memory."""
    model, batch = model_of(TINY if check.is_small else HALF_BILLION, device=check.device), rows_of(RAGGED)
    loss = LOSSES["policy"]
    forget_peak(check)
    plain = engine_of(model, check.device)
    plain_norms, plain_peak = train(plain, batch, loss, 3), peak_gib(check)
    expected = weights_of(plain)
    Worker().init_process_group()
    forget_peak(check)
    spread = engine_of(model, check.device)
    norms, peak = train(spread, batch, loss, 3), peak_gib(check)
    check.figures(backend=dist.get_backend_config(), unsharded_peak_gib=plain_peak, sharded_peak_gib=peak)
    limit = 1e-5 if check.is_small else 1e-3
    check.require(any("DTensor" in type(tensor).__name__ for tensor in spread.model.parameters()), "nothing was sharded")
    check.within(limit, grad_norm_gap=max(abs(a - b) / b for a, b in zip(norms, plain_norms, strict=True)))
    check.within(limit, weights_gap=largest_gap(weights_of(spread), expected))
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder) / "train", *spread.state())
        loaded = engine_of(model, check.device)
        loaded.load_state(*load_state(Path(folder) / "train"))
        check.within(0.0, loaded_gap=largest_gap(weights_of(loaded), weights_of(spread)))
        spread.save_hf(f"{folder}/hf")
        found = tf.AutoModelForCausalLM.from_pretrained(f"{folder}/hf")
        saved = dict(found.named_parameters())
        check.within(0.0, hf_gap=largest_gap(saved, {name: weights_of(spread)[name] for name in saved}))


def lengths_of_rows(check: Check) -> None:
    """(8) Memory and tokens a second of an update, by tokens in a micro-batch; what 32,768 would take, by a straight line."""
    sizes, vocabulary = (TINY, SMALL_VOCABULARY) if check.is_small else (HALF_BILLION, LARGE_VOCABULARY)
    totals = [256, 512, 1024] if check.is_small else [2048, 4096, 8192, 16_384]
    model, row = model_of(sizes, vocabulary=vocabulary, device=check.device), totals[0] // 2
    dtypes: dict[str, Literal["bfloat16"] | None] = {"float32": None, "bfloat16": "bfloat16"}
    for name, compute_dtype in dtypes.items():
        peaks: dict[int, float] = {}
        for total in totals:
            engine = engine_of(model, check.device, layout="bucketed", max_tokens=total, compute_dtype=compute_dtype)
            batch = rows_of([(row // 2, row - row // 2)] * (total // row // 2), vocabulary=vocabulary)
            update = partial(train, engine, batch, LOSSES["policy"], 1)
            try:
                update()
                forget_peak(check)
                seconds, _ = timed(check, update)
            except torch.OutOfMemoryError:
                check.figures(**{f"{name}_{total}": "out of memory"})
                break
            peak = peak_gib(check)
            check.figures(**{f"{name}_{total}": {"tokens_per_s": total / seconds, "peak_gib": peak}})
            if not isinstance(peak, str):
                peaks[total] = peak
        if len(peaks) > 1:
            slope, start = np.polyfit(list(peaks), list(peaks.values()), 1)
            check.figures(**{f"{name}_32768_gib": float(start + slope * 32_768), f"{name}_kib_per_token": float(slope * 2**20)})


def cost_of_a_pass(check: Check) -> None:
    """(9) What a pass and an entry of the mask cost, in tokens: the constants of the engine's cost model for this device."""
    sizes = TINY if check.is_small else HALF_BILLION
    model, length = model_of(sizes, device=check.device), 64 if check.is_small else 256
    entries, seconds = list[list[float]](), list[float]()
    # Rows, rows a pass, and layout: so that passes, tokens and masks change one without the other.
    for rows, rows_each, layout in PASSES:
        engine = engine_of(model, check.device, layout=layout, max_tokens=rows_each * length)
        update = partial(train, engine, rows_of([(length // 2, length // 2)] * (rows // 2)), LOSSES["policy"], 1)
        update()
        with passes_of(engine) as passes:
            seconds.append(min(timed(check, update)[0] for _ in range(3)))
        masks = sum(tokens**2 for tokens in passes) / 3 if layout == "packed" else 0.0
        entries.append([1.0, len(passes) / 3, float(rows * length), masks])
    step_s, pass_s, token_s, mask_s = np.linalg.lstsq(np.array(entries), np.array(seconds), rcond=None)[0].tolist()
    check.figures(step_ms=step_s * 1e3, pass_ms=pass_s * 1e3, token_us=token_s * 1e6)
    check.figures(hidden_size=sizes["hidden_size"], call_tokens=pass_s / token_s, mask_tokens=mask_s / token_s)


@contextmanager
def passes_of(engine: FSDP2Engine) -> Iterator[list[int]]:
    """The tokens of every forward pass in the block."""
    passes: list[int] = []

    def note(_: Any, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        passes.append(inputs["input_ids"].numel())

    handle = engine.model.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    handle.remove()


def decoding(check: Check) -> None:
    """(10) Decoding: tokens a second and peak memory by rows, and what a token launches and waits for."""
    sizes, vocabulary = (TINY, SMALL_VOCABULARY) if check.is_small else (ONE_AND_A_HALF_BILLION, LARGE_VOCABULARY)
    counts, length = ([4, 8], 8) if check.is_small else ([16, 128, 512], 64)
    model = model_of(sizes, vocabulary=vocabulary, dtype=torch.bfloat16, device=check.device)
    rollout, prompts = rollout_of(model), prompts_of([32, 64, 16, 48], vocabulary=vocabulary)
    for rows in counts:
        sampling = SamplingConfig(max_new_tokens=length, n=rows // 4)
        forget_peak(check)
        seconds, found = timed(check, partial(rollout.generate, prompts, sampling, seed=0, step=1))
        tokens = sum(map(len, tokens_of(found)))
        check.figures(**{f"rows_{rows}": {"tokens_per_s": tokens / seconds, "peak_gib": peak_gib(check)}})
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if check.is_cuda else [])]
    with profile(activities=kinds) as recorded:
        rollout.generate(prompts, SamplingConfig(max_new_tokens=8, n=4), seed=0, step=1)
    calls = {event.key: event.count for event in recorded.key_averages()}
    operators, launches, waits = (
        sum(count for key, count in calls.items() if key.startswith(names)) / 8
        for names in ("aten::", ("cudaLaunchKernel", "cuLaunchKernel"), ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    )
    on_gpu = {"launches_per_token": launches, "syncs_per_token": waits}
    check.figures(operators_per_token=operators, **(on_gpu if check.is_cuda else dict.fromkeys(on_gpu, NEEDS_CUDA)))


def whole_run(check: Check) -> None:
    """(11) A run on own rows, resumed and evaluated, gives the numbers of one that the CPU does in a piece."""
    with tempfile.TemporaryDirectory() as folder:
        found = numbers_of_run(f"{folder}/here", is_resumed=True)
        check.figures(**{f"here_{name}": value for name, value in found.items()})
        if check.is_cuda:
            command = [sys.executable, __file__, f"{folder}/cpu"]
            hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, env=hidden, stdout=subprocess.PIPE, text=True, check=True)
            expected = json.loads(done.stdout.splitlines()[-1])
        else:
            expected = numbers_of_run(f"{folder}/cpu", is_resumed=False)
    check.figures(**{f"cpu_{name}": value for name, value in expected.items()})
    check.within(1e-4, largest_gap=max(abs(found[name] - expected[name]) for name in expected))


def numbers_of_run(folder: str, *, is_resumed: bool) -> dict[str, float]:
    """Rewards, log-probs and gradient norms of two steps, in float64, so that every device draws the same tokens."""
    data = Path(folder) / "rows.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(40)))
    (Path(folder) / "reward.py").write_text(REWARD)
    config = {
        "name": "gpu_check",
        "run_root": folder,
        "runtime": "inline",
        "threads_per_rank": 1,
        "model": {"path": "char_llama", "dtype": "float64"},
        "task": {"train_files": [str(data)], "num_validation": 4, "num_held_out": 4},
        "reward": {"function": f"{folder}/reward.py:variety", "num_workers": 1},
        "warmup": {"steps": 1, "batch_rows": 8},
        "actor": {"optim": {"lr": 1e-3}},
        "rollout": {"sampling": {"n": 4, "max_new_tokens": 6}},
        "trainer": {"total_steps": 1 if is_resumed else 2, "prompts_per_step": 4, "trackers": [], "curve": False},
    }
    settings = Path(folder) / "run.yaml"
    settings.write_text(yaml.safe_dump(config))
    podium("train", str(settings))
    run = Path(folder) / "latest"
    if is_resumed:
        podium("train", "--resume", str(run), "trainer.total_steps=2")
        podium("eval", str(run))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("critic/rewards/mean", "rollout/neg_log_prob", "actor/grad_norm")
    return {f"{name}_{step['step']}": step[name] for step in steps for name in names if name in step}  # step 0 is validation


def podium(*arguments: str) -> None:
    """The command line, in this process."""
    app(list(arguments), standalone_mode=False)


def flat_memory(check: Check) -> None:
    """(12) Twenty steps in bfloat16 on batches of changing lengths: the memory that torch reserves does not grow."""
    sizes, vocabulary = (TINY, SMALL_VOCABULARY) if check.is_small else (HALF_BILLION, LARGE_VOCABULARY)
    engine = engine_of(
        model_of(sizes, vocabulary=vocabulary, device=check.device), check.device, max_tokens=4096, compute_dtype="bfloat16"
    )
    reserved: list[float] = []
    for step in range(20):
        rows = range(2 if check.is_small else 16)
        lengths = [(8 + (7 * step + 13 * row) % 120, 16 + (5 * step + 11 * row) % 240) for row in rows]
        train(engine, rows_of(lengths, vocabulary=vocabulary, seed=step), LOSSES["policy"], 1)
        reserved.append(torch.cuda.memory_reserved(check.device) / GIB if check.is_cuda else 0.0)
    if not check.is_cuda:
        check.figures(steps=20, reserved_gib=NEEDS_CUDA)
        return
    check.figures(reserved_gib_after_10=reserved[9], reserved_gib_after_20=reserved[19], peak_gib=peak_gib(check))
    check.require(reserved[19] <= 1.05 * reserved[9], f"reserved memory grows: {reserved}")


@dataclass(frozen=True)
class Stage:
    """A stage, and how long it may take at full size."""

    name: str
    function: Callable[[Check], None]
    limit_s: float


STAGES = {
    number: Stage(function.__name__, function, limit_s)
    for number, (function, limit_s) in enumerate(
        [
            (cpu_tests, 90.0),
            (devices, 30.0),
            (float64, 45.0),
            (same_tokens, 30.0),
            (bfloat16_layouts, 45.0),
            (same_bits, 30.0),
            (sharded, 60.0),
            (lengths_of_rows, 90.0),
            (cost_of_a_pass, 45.0),
            (decoding, 90.0),
            (whole_run, 90.0),
            (flat_memory, 60.0),
        ],
        start=1,
    )
}
"""By number, in order of worth."""


@dataclass(frozen=True)
class Options:
    """What the command line asks of every stage."""

    device: Literal["auto", "cpu", "cuda"]
    is_quick: bool


def run_in_child(number: int, options: Options, pipe: Connection) -> None:
    """Run a stage in this process, which is made for it; its findings go through the pipe, one after another."""
    os.setsid()  # so that a time limit ends all that the stage starts
    os.dup2(2, 1)  # standard output is for JSON lines alone
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(min(8, torch.get_num_threads()))
    try:
        with running_as(RankContext(device_type="cuda") if options.device == "cuda" else RankContext()):
            STAGES[number].function(Check(pipe.send, is_quick=options.is_quick))
    except Skip as reason:
        pipe.send(("skipped", str(reason)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    pipe.send(("done", None))
    with suppress(RuntimeError):
        dist.destroy_process_group() if dist.is_initialized() else None


if __name__ == "__main__":
    output = os.dup(1)
    os.dup2(2, 1)
    os.write(output, json.dumps(numbers_of_run(sys.argv[1], is_resumed=False)).encode())
