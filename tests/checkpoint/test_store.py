"""Checkpoints survive what can happen: exceptions, a full disk, kill -9, damage, replacement. Real files and processes."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.checkpoint import CheckpointStore
from podium.checkpoint import store as store_module
from podium.errors import CheckpointError


def save(store: CheckpointStore, step: int, text: str = "state", **info: int) -> None:
    with store.writing(step, info=dict(info)) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "rank-0.bin").write_text(f"{text} of step {step}")
        (folder / "driver.json").write_text("{}")


def save_half(store: CheckpointStore, step: int, failure: BaseException) -> None:
    with store.writing(step) as folder:
        (folder / "half").write_text("ha")
        raise failure


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def latest_step(store: CheckpointStore) -> int:
    found = store.latest()
    assert found is not None
    return found.step


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_a_checkpoint_is_listed_sized_and_summed(store: CheckpointStore) -> None:
    save(store, 10, world_size=2)
    found = store.latest()
    assert found is not None
    assert found.path == store.root / "step-10"
    assert found.step == 10
    found.verify()
    assert found.manifest.version == 1
    assert found.manifest.info == {"world_size": 2}
    assert set(found.manifest.files) == {"actor/rank-0.bin", "driver.json"}
    entry = found.manifest.files["driver.json"]
    assert (entry.size_bytes, entry.sha256[:8]) == (2, "44136fa3")  # sha256sum of "{}"
    assert names(store.root) == ["step-10"]


def test_an_empty_root_is_a_fresh_start(store: CheckpointStore) -> None:
    assert store.latest() is None
    with pytest.raises(CheckpointError, match="no step 3; it has: none"):
        store.load(3)


def test_older_ones_go_only_after_success(store: CheckpointStore) -> None:
    for step in (2, 4):
        save(store, step)
    with store.writing(6):
        assert {"step-2", "step-4"} <= set(names(store.root))
    assert names(store.root) == ["step-4", "step-6"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), ValueError("bug"), KeyboardInterrupt()])
def test_a_failing_writer_leaves_the_last_good_one(store: CheckpointStore, failure: BaseException) -> None:
    """Field report J1."""
    only = CheckpointStore(store.root, keep=1)
    save(only, 1)
    with pytest.raises(type(failure)):
        save_half(only, 2, failure)
    assert names(only.root) == ["step-1"]
    assert latest_step(only) == 1
    assert only.skipped == []


def test_a_disk_that_fails_while_sealing_harms_nothing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "seal", full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be finished.*No space left"):
        save(store, 2)
    assert names(store.root) == ["step-1"]


def test_kill_in_the_middle_leaves_the_last_good_one(store: CheckpointStore) -> None:
    save(store, 1)
    code = f"""
import pathlib, time
from podium.checkpoint import CheckpointStore
with CheckpointStore(pathlib.Path({str(store.root)!r}), keep=1).writing(2) as folder:
    (folder / "rank-0.bin").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(OSError, match="full"):
            save_half(store, 3, OSError("full"))
        assert len(list(store.root.glob(".tmp-step-2-*"))) == 1  # a living writer's folder is not swept
        writer.send_signal(signal.SIGKILL)
    (left,) = store.root.glob(".tmp-step-2-*")
    assert latest_step(store) == 1
    assert store.skipped == [f"{left.name}: never finished"]
    save(store, 2)
    assert names(store.root) == ["step-1", "step-2"]


def test_a_kill_in_the_very_first_save_is_a_fresh_start_that_is_told(store: CheckpointStore) -> None:
    (store.root / ".tmp-step-1-00").mkdir(parents=True)
    assert store.latest() is None
    assert store.skipped == [".tmp-step-1-00: never finished"]


def damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; what the reason must say."""
    shard = folder / "actor" / "rank-0.bin"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
        return "rank-0.bin has 14 bytes, the manifest says 15"
    if how == "flipped":
        shard.write_bytes(b"S" + shard.read_bytes()[1:])
        return "rank-0.bin is damaged"
    if how == "missing":
        shard.unlink()
        return "rank-0.bin is missing"
    manifest = folder / "manifest.json"
    if how == "no manifest":
        manifest.unlink()
        return "manifest.json is missing"
    if how == "other version":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2}))
        return "manifest.json is damaged or of another version"
    if how == "renamed":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 8}))
        return "its manifest says step 8"
    manifest.write_text("garbage")
    return "manifest.json is damaged"


DAMAGES = ["truncated", "flipped", "missing", "no manifest", "garbage manifest", "other version", "renamed"]


@pytest.mark.parametrize("how", DAMAGES)
def test_the_newest_complete_one_is_chosen_and_the_refusal_told(store: CheckpointStore, how: str) -> None:
    """Field report J5."""
    big = CheckpointStore(store.root, keep=3)
    for step in (7, 8, 9):
        save(big, step)
    reason = damage(big.root / "step-9", how)
    assert latest_step(big) == 8
    assert len(big.skipped) == 1
    assert big.skipped[0].startswith("step-9: ")
    assert reason in big.skipped[0]
    with pytest.raises(CheckpointError, match="step-9"):
        big.load(9)


@pytest.mark.parametrize("how", DAMAGES)
def test_nothing_complete_is_no_fresh_start(store: CheckpointStore, how: str) -> None:
    save(store, 9)
    reason = damage(store.root / "step-9", how)
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert reason in str(caught.value)
    assert "none is complete" in str(caught.value)


def test_damaged_ones_never_push_out_a_good_one(store: CheckpointStore) -> None:
    only = CheckpointStore(store.root, keep=2)
    for step in (8, 9):
        save(only, step)
    damage(only.root / "step-9", "truncated")
    save(only, 10)
    assert latest_step(only) == 10
    damage(only.root / "step-10", "truncated")
    assert latest_step(only) == 8


def test_a_later_damaged_one_does_not_push_out_what_was_just_written(store: CheckpointStore) -> None:
    only = CheckpointStore(store.root, keep=1)
    save(only, 20)
    damage(only.root / "step-20", "truncated")
    save(only, 11)
    assert latest_step(only) == 11


def test_a_step_is_replaced(store: CheckpointStore) -> None:
    save(store, 5, "old")
    save(store, 5, "new")
    assert (store.load(5).path / "actor" / "rank-0.bin").read_text() == "new of step 5"
    assert names(store.root) == ["step-5"]


def test_a_crash_between_the_two_renames_of_a_replacement(store: CheckpointStore) -> None:
    save(store, 5, "old")
    (store.root / "step-5").rename(store.root / ".replaced-step-5")
    assert latest_step(store) == 5
    save(store, 5, "new")
    assert (store.load(5).path / "actor" / "rank-0.bin").read_text() == "new of step 5"
    assert names(store.root) == ["step-5"]


def test_a_crash_after_the_renames_of_a_replacement(store: CheckpointStore) -> None:
    save(store, 5, "old")
    shutil.copytree(store.root / "step-5", store.root / ".replaced-step-5")
    save(store, 6)
    assert names(store.root) == ["step-5", "step-6"]


def test_discard_after_takes_the_abandoned_future(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    shutil.copytree(store.root / "step-2", store.root / ".replaced-step-2")
    store.discard_after(1)
    assert names(store.root) == ["step-1"]


def test_wrong_use_is_told(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointStore(store.root, keep=0)
    with pytest.raises(CheckpointError, match="plain JSON"), store.writing(1, info={"t": object()}):  # type: ignore[dict-item]
        pass
    with pytest.raises(CheckpointError, match="the store's own"), store.writing(1) as folder:
        (folder / "manifest.json").write_text("{}")
    assert names(store.root) == []
