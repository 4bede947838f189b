"""Runs over two Ray nodes on one machine, which do not see the same files everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.ray_two_folders import UNSHARE


@pytest.mark.slow  # a cluster of its own
@pytest.mark.timeout(960)
def test_two_nodes_with_folders_of_their_own(tmp_path):
    """The driver refuses a checkpoint that rank 0 wrote on its own disk, and keeps the one before."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"this machine does not let us make a mount namespace: {' '.join(UNSHARE)}")
    command = [sys.executable, "-m", "tests.trainers.ray_two_folders", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    words = [line for line in done.stdout.splitlines() if line.isalpha()]
    assert words == ["places", "variables", "checkpoints", "room", "workers", "setup", "refused", "trained", "whole"]
