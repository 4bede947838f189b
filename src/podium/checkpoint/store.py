"""The checkpoints of a run: written beside, listed in a manifest, renamed into place; older ones go only after that.

    root/step-10/             a checkpoint: its files and manifest.json
    root/.tmp-step-20-4f1c/   being written; its writer holds a lock that dies with it, so a dead writer's is swept
    root/.replaced-step-10/   the former step-10, for the moment between two renames

At every moment, kill -9 and power loss included, what was complete before is complete still. One store writes to a root at
a time; any number may read.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from pydantic import JsonValue

from podium.checkpoint.manifest import Checkpoint, Manifest, WrittenFiles, sync, write_manifest
from podium.errors import CheckpointError

TEMP_PREFIX: Final = ".tmp-"
REPLACED_PREFIX: Final = ".replaced-"
_STEP_FOLDER: Final = re.compile(rf"(?:{re.escape(REPLACED_PREFIX)})?step-(\d+)")


class Saver(Protocol):
    """Writes files into a folder, perhaps from many ranks; the list of each rank's files is its answer."""

    def __call__(self, local_path: str, /) -> Sequence[WrittenFiles]: ...


class CheckpointStore:
    """Saves and finds the checkpoints below `root`.

    `skipped` tells, after `latest()`, which newer folders were refused and why.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        """`keep`: how many of the newest complete checkpoints stay, at least 1."""
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {keep}")
        self.root = root
        self.keep = keep
        self.skipped: list[str] = []

    def save(self, step: int, save: Saver, *, info: Mapping[str, JsonValue] | None = None) -> None:
        """Let `save` write the files of `step` into a folder, which is the checkpoint once all of them are seen here.

        `info` goes into the manifest. An exception of `save` passes through, and its folder is removed. Raises CheckpointError
        when the files are not as they are listed, or when the disk refuses; earlier checkpoints are whole either way.
        """
        draft = Manifest.draft(step, info or {})
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temp = self.root / f"{TEMP_PREFIX}step-{step}-{secrets.token_hex(4)}"
        temp.mkdir()
        lock = os.open(temp, os.O_RDONLY)
        try:
            _try_lock(lock)
            self._publish(temp, draft, save(str(temp.absolute())))
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # after a success there is nothing left under this name
            os.close(lock)
        self._prune(step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that passes `verify`, or None when none was ever finished.

        `skipped` lists the newer ones that do not pass. Raises CheckpointError, with the reasons, when there are
        checkpoints and none is whole, since a fresh start would lose them in silence.
        """
        self.skipped = [f"{path.name}: never finished" for path in self._temps()]
        folders = self._folders()
        for step in sorted(folders, reverse=True):
            try:
                return self.load(step)
            except CheckpointError as exc:
                self.skipped.append(f"step-{step}: {exc}")
        if folders:
            reasons = "".join(f"\n  {reason}" for reason in self.skipped)
            raise CheckpointError(f"{self.root} has checkpoints, but none is complete:{reasons}\nMove them away to start afresh")
        return None

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of that step, verified. CheckpointError when it is missing or damaged."""
        folders = self._folders()
        if step not in folders:
            raise CheckpointError(f"{self.root} has no step {step}; it has: {', '.join(map(str, sorted(folders))) or 'none'}")
        checkpoint = Checkpoint.read(folders[step])
        if checkpoint.step != step:
            raise CheckpointError(f"{checkpoint.path} is damaged: its manifest says step {checkpoint.step}")
        checkpoint.verify()
        return checkpoint

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, when a run goes on from there: its future is another one now."""
        self._sweep()
        for later, path in self._folders().items():
            if later > step:
                self._remove(path)

    def _publish(self, temp: Path, draft: Manifest, written: Sequence[WrittenFiles]) -> None:
        final = self.root / f"step-{draft.step}"
        replaced = self.root / f"{REPLACED_PREFIX}{final.name}"
        try:
            write_manifest(temp, draft, written)
            if final.exists():
                final.rename(replaced)
            temp.rename(final)
            sync(self.root)
            sync(self.root.parent)  # the root may be new
        except OSError as exc:
            raise CheckpointError(
                f"the checkpoint of step {draft.step} cannot be finished: {exc}; earlier ones are whole"
            ) from exc
        if replaced.exists():
            self._remove(replaced)

    def _prune(self, newest: int) -> None:
        """Remove what is older than the `keep` newest complete checkpoints up to the one just written.

        Damaged ones do not count, so that they never push out a good one.
        """
        folders, num_kept = self._folders(), 1
        for step in sorted((step for step in folders if step < newest), reverse=True):
            if num_kept >= self.keep:
                self._remove(folders[step])
            elif _looks_complete(folders[step]):
                num_kept += 1

    def _sweep(self) -> None:
        """Remove what dead writers left behind."""
        for path in self._temps():
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
        for replaced in self.root.glob(f"{REPLACED_PREFIX}step-*"):
            if (self.root / replaced.name.removeprefix(REPLACED_PREFIX)).exists():
                self._remove(replaced)

    def _remove(self, path: Path) -> None:
        """Rename first: a removal that is cut short leaves something to sweep, not a damaged checkpoint.

        Of a checkpoint that a user moved elsewhere and linked here, the link goes.
        """
        doomed = self.root / f"{TEMP_PREFIX}{path.name.lstrip('.')}-{secrets.token_hex(4)}"
        path.rename(doomed)
        if doomed.is_symlink():
            doomed.unlink()
        shutil.rmtree(doomed, ignore_errors=True)

    def _folders(self) -> dict[int, Path]:
        """Where each step's checkpoint is: `step-N`, or `.replaced-step-N` if a crash came between the two renames."""
        found = sorted(self.root.iterdir()) if self.root.exists() else []  # ".replaced" sorts first, "step" wins
        return {int(match[1]): path for path in found if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir()}

    def _temps(self) -> list[Path]:
        return sorted(self.root.glob(f"{TEMP_PREFIX}*"))


def _looks_complete(path: Path) -> bool:
    try:
        Checkpoint.read(path).verify_sizes()
    except CheckpointError:
        return False
    return True


def _try_lock(descriptor: int) -> bool:
    """Whether this process now holds the folder's lock. False also where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_abandoned(temp: Path) -> bool:
    """Whether no living writer holds the folder's lock."""
    try:
        descriptor = os.open(temp, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)
