"""What is in a checkpoint folder: records of its entries and their files."""

from typing import NamedTuple

from exporter.contract.status import DamagedFile

FROM_EARLIER_JOB = "left by an earlier job"  # why damage in a file older than the job is only a doubt


class CheckpointIndex(NamedTuple):
    """A file that names others of its checkpoint; paths are relative to the checkpoint folder."""

    path: str
    shards: tuple[str, ...]
    lengths: tuple[tuple[str, int], ...] = ()  # where each of these files must end
    optional: tuple[str, ...] = ()  # files that a writer leaves out if they would hold nothing but a default


class CheckpointFile(NamedTuple):
    """A regular file as of one poll; times in epoch seconds."""

    path: str  # relative to the checkpoint folder
    size: int
    mtime: float
    inode: int
    temporary: bool = False

    def is_unchanged(self, other: "CheckpointFile") -> bool:
        """Whether it has not been written since. A new inode alone is no change: some file systems invent inodes."""
        return (self.size, self.mtime, self.temporary) == (other.size, other.mtime, other.temporary)


class CheckpointEntry(NamedTuple):
    """One file or directory directly in the checkpoint folder."""

    name: str
    bare: str  # name without temporary marks: `checkpoint_12.pt` for `.checkpoint_12.pt.tmp`
    temporary: bool
    is_directory: bool
    inode: int
    files: tuple[CheckpointFile, ...]  # a file itself, or all regular files in a directory
    is_fully_read: bool = True  # whether all of its files could be read
    indexes: tuple[CheckpointIndex, ...] = ()  # indexes that name shards
    valid: int = 0  # checked files found valid
    checked: int = 0  # files with a final check result
    damaged: tuple[DamagedFile, ...] = ()  # damaged files: in a sidecar, those that a second check confirmed
    unproven: tuple[DamagedFile, ...] = ()  # files that may be damaged, with the reason for the doubt
    is_closed: bool = False  # whether a file is damaged and no process can write it any more
