"""Scripts written for verl run on Ray after their import lines are changed, and print what verl prints.

The expected lines are those that verl 0.9.1 printed for the unchanged scripts, but for the one that `padding` marks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.verl.ported.imports import MODULES, ported

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

HERE = Path(__file__).parent
SCRIPTS = ("policy_workers.py", "train.py", "colocated.py", "detached_server.py", "detached_client.py")

TRAINED = """
names ['policyPolicyWorker_0:0', 'policyPolicyWorker_0:1', 'policyPolicyWorker_0:2', 'policyPolicyWorker_0:3'] 4
one_to_all [10.0, 10.0, 10.0, 10.0] ['<actor0/4>', '<actor1/4>', '<actor2/4>', '<actor3/4>']
dp_proto [0, 3, 6, 9, 12, 15, 18, 21] [0, 0, 1, 1, 2, 2, 3, 3] ['u0', 'u1', 'u2', 'u3', 'u4', 'u5', 'u6', 'u7']
padding [0, 3, 6, 9, 12] 5 5
all_to_all [5, 12, 21, 32]
rank_zero rank 0 saves [1, 2, 3, 4] to ckpt
custom [['a', 'e'], ['b', 'f'], ['c', 'g'], ['d', 'h']] [10, 21, 32, 43]
registered [10, 50, 20, 30, 40]
refs [10, 11, 12, 13] 12
future [1, 2, 3, 4] {'temperature': 0.5}
chained [3, 6, 9, 12]
mesh [0, 2] [30.0, 30.0] [3, 3]
other mesh [0, -1, -2, -3]
tensordict [0, -1, -2, -3]
metric [{'rows': 2, 'rank': 0}, {'rows': 2, 'rank': 1}, {'rows': 2, 'rank': 2}, {'rows': 2, 'rank': 3}]
execute_all [2, 4, 6, 8] [5, 6, 7, 8]
execute_rank_zero 7
with_func [0, 102, 204, 306]
func_rank_zero 6.0
nested [1001, 1002, 1003, 1004]
"""

COLOCATED = """
pools 3 2
roles ['actor_rollout', 'critic', 'rm']
spawn [100, 101] [90, 91]
reward [5, 6, 7]
direct ['hi from 0', 'hi from 1']
spawn_fused [1, 2] [-9, -8] [90, 91]
fuse [1, 2] [-9, -8] [-9, -8]
pools 1 2 2 [1, 1] [0, 1, 2]
one [0]
two [0, 1]
both [0, 1]
"""

SERVED = "[41, 42] ['judgeJudgeWorker_0:0', 'judgeJudgeWorker_0:1']"

ATTACHED = """
[41, 42] [40, 41, 42, 43]
[42, 43]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, after the port."""
    made = tmp_path_factory.mktemp("ported")
    for name in SCRIPTS:
        (made / name).write_text(ported((HERE / name).read_text()))
    return made


def run(script: Path, ray_address: str) -> list[str]:
    """What the script prints, run by itself on that cluster."""
    environment = {**os.environ, "RAY_ADDRESS": ray_address, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("(")]  # Ray repeats what workers print


def session_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def test_a_port_changes_import_lines_only():
    for name in SCRIPTS:
        before, after = (HERE / name).read_text(), ported((HERE / name).read_text())
        assert before != after
        changed = [(old, new) for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
        assert all(old.startswith("from verl") and new.startswith("from podium") for old, new in changed)
        code = "\n".join(line for line in after.splitlines() if not line.startswith('"""'))
        assert "verl" not in code.replace("from podium.compat.verl import", "")


def test_every_module_of_the_table_has_what_it_should():
    with pytest.raises(KeyError):
        ported("from verl.trainer import main_ppo")
    assert set(MODULES.values()) == {"podium.compat.verl"}


@pytest.mark.slow  # a driver of its own
def test_one_group(folder: Path):
    assert run(folder / "train.py", session_address()) == TRAINED.strip().splitlines()


@pytest.mark.slow  # a cluster of its own
def test_colocated_roles_on_several_pools(folder: Path):
    assert run(folder / "colocated.py", "local") == COLOCATED.strip().splitlines()


@pytest.mark.slow  # two drivers of their own
def test_workers_that_outlive_their_driver(folder: Path):
    assert run(folder / "detached_server.py", session_address()) == [SERVED]
    assert run(folder / "detached_client.py", session_address()) == ATTACHED.strip().splitlines()
