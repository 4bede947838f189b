"""A folder of a checkpoint for each role, and checkpoints of an older Podium without such folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from podium.checkpoint import CheckpointStore, WrittenFiles, load_roles, save_roles
from podium.errors import CheckpointError


def saver(role: str) -> Callable[[str], list[WrittenFiles]]:
    """Two ranks of which the first writes."""

    def save(folder: str) -> list[WrittenFiles]:
        (Path(folder) / "state").write_text(role)
        return [WrittenFiles.of(Path(folder), f"{role} rank 0"), WrittenFiles(f"{role} rank 1", {})]

    return save


def loaded(checkpoint: Path, *roles: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def loader(role: str) -> Callable[[str], None]:
        return lambda folder: found.update({role: (Path(folder) / "state").read_text()})

    load_roles({role: loader(role) for role in roles}, checkpoint)
    return found


def test_each_role_reads_what_it_wrote_and_the_manifest_lists_all(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(3, save_roles({role: saver(role) for role in ("actor", "critic")}))
    checkpoint = store.load(3)
    assert set(checkpoint.manifest.files) == {"actor/state", "critic/state"}
    assert loaded(checkpoint.path, "critic", "actor") == {"actor": "actor", "critic": "critic"}


def test_an_older_checkpoint_is_the_actors(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(3, saver("actor"))
    assert loaded(store.load(3).path, "actor") == {"actor": "actor"}


def test_a_role_that_the_checkpoint_does_not_hold_is_named_before_any_is_read(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    store.save(1, saver("actor"))
    store.save(2, save_roles({"actor": saver("actor")}))
    for step, there in ((1, "the actor alone"), (2, "actor")):
        with pytest.raises(
            CheckpointError, match=rf"must hold a folder 'critic' with the state of that role; it has {there}\. Go"
        ):
            loaded(store.load(step).path, "actor", "critic")
