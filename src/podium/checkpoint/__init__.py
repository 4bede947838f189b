"""Save and resume, exact and atomic: a store of checkpoints, and the two files that hold one owner's state."""

from podium.checkpoint.manifest import Checkpoint, FileEntry, Manifest, sync
from podium.checkpoint.state import load_state, save_state
from podium.checkpoint.store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "FileEntry", "Manifest", "load_state", "save_state", "sync"]
