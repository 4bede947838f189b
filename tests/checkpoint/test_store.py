"""Checkpoints survive what can happen: exceptions, a full disk, kill -9, damage, replacement. Real files and processes."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest

from podium.checkpoint import Checkpoint, CheckpointStore, Manifest, WrittenFiles, manifest, write_manifest
from podium.checkpoint import store as store_module
from podium.errors import CheckpointError


def save(store: CheckpointStore, step: int, text: str = "state", **info: int) -> None:
    def write(local_path: str) -> list[WrittenFiles]:
        folder = Path(local_path)
        (folder / "actor").mkdir()
        (folder / "actor" / "rank-0.bin").write_text(f"{text} of step {step}")
        (folder / "driver.json").write_text("{}")
        return [
            WrittenFiles.of(folder, "rank 0 on a", ["actor/rank-0.bin"]),
            WrittenFiles.of(folder, "the driver", ["driver.json"]),
            WrittenFiles.of(folder, "rank 1 on b", []),
        ]

    store.save(step, write, info=dict(info))


def save_half(store: CheckpointStore, step: int, failure: BaseException) -> None:
    def write(local_path: str) -> list[WrittenFiles]:
        (Path(local_path) / "half").write_text("ha")
        raise failure

    store.save(step, write)


def saved_elsewhere(store: CheckpointStore, step: int, elsewhere: Path, *seen: str, shortened: bool = False) -> None:
    """Two ranks write on a disk that the driver does not see; `seen` files come to it all the same."""

    def write(local_path: str) -> list[WrittenFiles]:
        elsewhere.mkdir(exist_ok=True)
        for rank in range(2):
            (elsewhere / f"rank-{rank}.bin").write_text("state")
        for name in seen:
            (Path(local_path) / name).write_text("sta" if shortened else "state")
        return [WrittenFiles.of(elsewhere, f"rank {rank} on node-{rank}", [f"rank-{rank}.bin"]) for rank in range(2)]

    store.save(step, write)


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

    def write(local_path: str) -> list[WrittenFiles]:
        assert {"step-2", "step-4"} <= set(names(store.root))
        (Path(local_path) / "state").write_text("")
        return [WrittenFiles.of(Path(local_path), "rank 0")]

    store.save(6, write)
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

    monkeypatch.setattr(store_module, "write_manifest", full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be finished.*No space left"):
        save(store, 2)
    assert names(store.root) == ["step-1"]


def test_kill_in_the_middle_leaves_the_last_good_one(store: CheckpointStore) -> None:
    save(store, 1)
    code = f"""
import pathlib, time
from podium.checkpoint import CheckpointStore
def write(folder):
    (pathlib.Path(folder) / "rank-0.bin").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
CheckpointStore(pathlib.Path({str(store.root)!r}), keep=1).save(2, write)
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


def test_a_kill_in_the_very_first_save_is_a_fresh_start_that_is_reported(store: CheckpointStore) -> None:
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
    if how == "empty":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": {}}))
        return "manifest.json lists no file"
    if how == "other version":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2}))
        return "manifest.json is damaged or of another version"
    if how == "renamed":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 8}))
        return "its manifest says step 8"
    if how == "unreadable":  # size 0, and an I/O error to whoever reads it
        shard.unlink()
        shard.symlink_to("/proc/self/mem")
        listed = json.loads(manifest.read_text())
        listed["files"]["actor/rank-0.bin"]["size_bytes"] = 0
        manifest.write_text(json.dumps(listed))
        return "rank-0.bin cannot be read: Input/output error"
    manifest.write_text("garbage")
    return "manifest.json is damaged"


DAMAGES = [
    "truncated",
    "flipped",
    "missing",
    "no manifest",
    "garbage manifest",
    "empty",
    "other version",
    "renamed",
    "unreadable",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_the_newest_complete_one_is_chosen_and_the_refusal_reported(store: CheckpointStore, how: str) -> None:
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
def test_without_a_complete_checkpoint_nothing_starts_afresh(store: CheckpointStore, how: str) -> None:
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


def test_of_a_checkpoint_that_was_moved_and_linked_the_link_goes(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    (store.root / "step-1").rename(tmp_path / "elsewhere")
    (store.root / "step-1").symlink_to(tmp_path / "elsewhere")
    for step in (2, 3):
        save(store, step)
    assert names(store.root) == ["step-2", "step-3"]
    assert "manifest.json" in names(tmp_path / "elsewhere")


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


def test_wrong_use_is_an_error(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointStore(store.root, keep=0)
    with pytest.raises(CheckpointError, match="plain JSON"):
        store.save(1, lambda folder: [], info={"t": object()})  # type: ignore[dict-item]
    assert not store.root.exists()


def listing(*names: str, writer: str = "rank 0 on a") -> Callable[[str], list[WrittenFiles]]:
    def write(local_path: str) -> list[WrittenFiles]:
        for name in ("state", "manifest.json"):
            (Path(local_path) / name).write_text("{}")
        return [WrittenFiles.of(Path(local_path), writer, names), WrittenFiles.of(Path(local_path), "rank 1 on b", ["state"])]

    return write


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda folder: [], r"nothing was written into .*\(asked: no rank\)"),
        (lambda folder: [WrittenFiles.of(Path(folder), f"rank {rank}") for rank in (0, 1)], r"\(asked: rank 0, rank 1\)"),
        (listing("state"), r"rank 0 on a and rank 1 on b both wrote .*/state: use a name for each rank"),
        (listing("manifest.json"), r"rank 0 on a wrote .*manifest\.json; that name is the manifest's own"),
        (listing(), r"holds manifest\.json, but the writer did not list it"),
    ],
)
def test_a_list_that_is_not_the_folder_is_refused_and_the_older_one_stays(
    store: CheckpointStore, write: Callable[[str], list[WrittenFiles]], reason: str
) -> None:
    only = CheckpointStore(store.root, keep=1)
    save(only, 1)
    with pytest.raises(CheckpointError, match=reason):
        only.save(2, write)
    assert names(only.root) == ["step-1"]
    assert latest_step(only) == 1


@pytest.mark.parametrize(
    ("seen", "shortened", "reason"),
    [
        ([], False, r"rank 0 on node-0 wrote .*/rank-0\.bin with 5 bytes, but the driver on .* does not see the file\. The"),
        (["rank-0.bin"], False, r"rank 1 on node-1 wrote .*/rank-1\.bin with 5 bytes"),
        (["rank-0.bin", "rank-1.bin"], True, r"rank 0 on node-0 wrote .* 5 bytes, but the driver on .* sees 3 bytes"),
    ],
)
def test_files_on_another_nodes_disk_are_an_error_and_the_older_one_stays(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str], shortened: bool, reason: str
) -> None:
    """The driver sealed an empty folder, and keep=1 removed the good checkpoint."""
    monkeypatch.setattr(manifest, "VISIBLE_WITHIN_S", 0.0)
    only = CheckpointStore(store.root, keep=1)
    save(only, 1)
    with pytest.raises(CheckpointError, match=reason):
        saved_elsewhere(only, 2, tmp_path / "elsewhere", *seen, shortened=shortened)
    assert names(only.root) == ["step-1"]
    assert latest_step(only) == 1


def test_files_that_are_seen_late_are_waited_for(store: CheckpointStore, tmp_path: Path) -> None:
    """As on NFS, where another node's new files are seen after a while."""
    (tmp_path / "late").write_text("state")

    def write(local_path: str) -> list[WrittenFiles]:
        Timer(0.3, lambda: (Path(local_path) / "late").write_text("state")).start()
        return [WrittenFiles.of(tmp_path, "rank 0 on a", ["late"])]

    store.save(1, write)
    assert store.load(1).manifest.files.keys() == {"late"}


def test_a_model_folder_is_sealed_and_verified_as_a_checkpoint_is(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights").write_text("abc")
    write_manifest(tmp_path, Manifest.draft(7, {}), [WrittenFiles.of(tmp_path, "rank 0")])
    found = Checkpoint.read(tmp_path)
    found.verify()
    assert (found.step, list(found.manifest.files)) == (7, ["inner/weights"])
    (tmp_path / "inner" / "weights").write_text("abd")
    with pytest.raises(CheckpointError, match="weights is damaged"):
        found.verify()
