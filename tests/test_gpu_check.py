"""scripts/gpu_check.py on a CPU: every stage runs, and what is asked of its lines holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a process a stage


def check(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the lines of standard output, standard error."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_all_stages_of_the_gpu_check_hold_on_a_cpu():
    code, lines, errors = check("--device", "cpu", "--quick")
    *stages, last = lines
    assert code == 0, (lines, errors[-4000:])
    assert [line["stage"] for line in stages] == last["summary"]["ok"] == list(range(1, 13))
    figures = {line["name"]: line["figures"] for line in stages}
    assert figures["cpu_tests"]["result"].split()[1] == "passed"
    assert (figures["devices"]["device"], figures["devices"]["backend"]) == ("cpu", "cpu:gloo,cuda:gloo")
    assert max(figures["float64"].values()) <= 1e-9
    assert figures["same_tokens"].pop("log_probs_gap") <= 1e-9
    assert figures["same_tokens"] == {f"{kind}_is_equal": True for kind in ("plain", "greedy", "top_k", "top_p", "stop")}
    assert {"packed_gap", "shared_gap"} <= figures["bfloat16_layouts"].keys()
    assert len(set(figures["same_bits"].values())) == 1
    assert (figures["sharded"]["loaded_gap"], figures["sharded"]["sharded_peak_gib"]) == (0.0, "needs cuda")
    assert figures["lengths_of_rows"]["bfloat16_1024"]["tokens_per_s"] > 0
    assert {"call_tokens", "mask_tokens"} <= figures["cost_of_a_pass"].keys()
    assert figures["decoding"]["operators_per_token"] > 100
    assert figures["decoding"]["launches_per_token"] == "needs cuda"
    assert figures["whole_run"]["here_actor/grad_norm_2"] > 0
    assert figures["flat_memory"] == {"steps": 20, "reserved_gib": "needs cuda"}


def test_a_stage_is_killed_when_its_time_is_over_and_later_ones_are_skipped():
    code, (killed, skipped, last), _ = check("--device", "cpu", "--quick", "--stages", "11,12", "--budget-s", "0.5")
    assert (code, last["summary"]) == (1, {"ok": [], "failed": [11], "skipped": [12]})
    assert killed["reason"] == "killed after 0.5 s, its time limit"
    assert skipped["reason"] == "the budget of 0.5 s is spent"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_gpu_that_is_asked_for_and_missing_fails_the_stage():
    code, (line, _), _ = check("--device", "cuda", "--quick", "--stages", "2")
    assert (code, line["status"]) == (1, "failed")
    assert "has a GPU reserved, but torch" in line["reason"]


@pytest.mark.parametrize("stages", ["0", "13", "2-1", "x"])
def test_stages_that_do_not_exist_are_exit_code_2(stages: str):
    code, lines, errors = check("--stages", stages)
    assert (code, lines) == (2, [])
    assert "--stages" in errors
