"""Save and resume, exact and atomic: a store of checkpoints, a folder for each role, and the two files of one owner's state."""

from podium.checkpoint.manifest import Checkpoint, FileEntry, Manifest, WrittenFiles, file_entry, sync, write_manifest
from podium.checkpoint.roles import load_roles, save_roles
from podium.checkpoint.state import load_state, save_state
from podium.checkpoint.store import CheckpointStore, Saver

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "FileEntry",
    "Manifest",
    "Saver",
    "WrittenFiles",
    "file_entry",
    "load_roles",
    "load_state",
    "save_roles",
    "save_state",
    "sync",
    "write_manifest",
]
