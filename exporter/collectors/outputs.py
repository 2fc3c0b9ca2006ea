"""Output and checkpoint files: how many, how large, how fast they grow, when they last changed."""

from dataclasses import dataclass

from exporter.collectors.base import Context, Status
from exporter.derive.rates import Growth
from exporter.derive.workers import worker_rank
from exporter.families import Family, Samples
from exporter.readers.files import FileFacts, newest, read_files

FILES = Family("output_files", "Files of the group that this node answers for.", labels=("group",))
BYTES = Family("output_bytes", "Their size.", labels=("group",))
GROWTH = Family("output_growth_bytes_per_second", "Growth over the last minute.", labels=("group",))
MTIME = Family("output_file_mtime_timestamp_seconds", "When the newest of them was last written.", labels=("group",))

CHECKPOINT = "checkpoint"
"""Name of the group whose files are checkpoints."""
SAME_CHECKPOINT_S = 60.0
CHECKPOINTS_KEPT = 16


@dataclass(frozen=True)
class GroupFacts:
    """One path group at one look."""

    name: str
    files: int
    bytes: int
    growth: float | None
    mtime: float | None


class OutputsCollector:
    """Files of each path group.

    On a shared file system every node sees all files. A node answers for those whose names carry
    the number of one of its workers; the first node also for those that carry none, so that sums
    over the nodes count every file once.
    """

    name = "outputs"
    families = (FILES, BYTES, GROWTH, MTIME)

    def __init__(self, context: Context) -> None:
        self._manifest = context.manifest
        self._clock = context.clock
        self.interval_s = context.manifest.check_interval_s
        self._groups = [group for group in context.manifest.groups if group.pattern is not None]
        self._growth = {group.name: Growth() for group in self._groups}
        self._ranks_of_roles = context.manifest.ranks_of_roles()
        self._ranks = {task.rank for task in context.tasks}
        self._others = {task.rank for task in context.manifest.tasks} - self._ranks
        self._first_node = context.identity.node_index == 0
        self._start = context.identity.start
        self._board = context.board

    def read(self) -> tuple[GroupFacts, ...]:
        found = []
        for group in self._groups:
            files = [
                file
                for file in read_files(self._manifest.directory(group), group.pattern or "*")
                if self._answers_for(file)
            ]
            size = sum(file.size_bytes for file in files)
            self._growth[group.name].update(self._clock.monotonic(), size)
            found.append(GroupFacts(group.name, len(files), size, self._growth[group.name].per_second(), newest(files)))
            if group.name == CHECKPOINT:
                self._note_checkpoint(found[-1].mtime)
        return tuple(found)

    def _note_checkpoint(self, mtime: float | None) -> None:
        """Remember when checkpoints of this job were written: files that are written within a minute are of one."""
        if mtime is not None and self._start is not None and mtime < self._start:
            return  # left by an earlier job: the time since then is no rhythm
        saved = self._board.checkpoints
        if mtime is not None and (not saved or mtime > saved[-1]):
            again = len(saved) > 0 and mtime - saved[-1] < SAME_CHECKPOINT_S
            self._board.checkpoints = (*(saved[:-1] if again else saved), mtime)[-CHECKPOINTS_KEPT:]

    def _answers_for(self, file: FileFacts) -> bool:
        rank = worker_rank(file.name, self._ranks_of_roles)
        if rank in self._ranks:
            return True
        return self._first_node and rank not in self._others

    def render(self, groups: tuple[GroupFacts, ...], out: Samples) -> None:
        for group in groups:
            out.add(FILES, group.files, group=group.name)
            out.add(BYTES, group.bytes, group=group.name)
            out.add(GROWTH, group.growth, group=group.name)
            out.add(MTIME, group.mtime, group=group.name)

    def describe(self, groups: tuple[GroupFacts, ...], status: Status) -> None:
        for group in groups:
            status.outputs.append(
                {
                    "group": group.name,
                    "files": group.files,
                    "bytes": group.bytes,
                    "growth_bytes_per_second": group.growth,
                    "mtime": group.mtime,
                }
            )
