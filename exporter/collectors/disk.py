"""Space of the file systems that the job writes to."""

from exporter.collectors.base import Context, Status
from exporter.families import Family, Samples
from exporter.readers.files import SpaceFacts, read_space

AVAILABLE = Family(
    "filesystem_avail_bytes",
    "Bytes an ordinary user can still write where the group's files go.",
    labels=("group",),
)
SIZE = Family("filesystem_size_bytes", "Size of that file system.", labels=("group",))

DiskSnapshot = tuple[tuple[str, SpaceFacts], ...]


class DiskCollector:
    """Space for each path group and for the run directory."""

    name = "disk"
    families = (AVAILABLE, SIZE)

    def __init__(self, context: Context) -> None:
        self.interval_s = max(5.0, context.manifest.check_interval_s)
        self._directories = [(group.name, context.manifest.directory(group)) for group in context.manifest.groups]
        self._directories.append(("run", context.manifest.run_dir))

    def read(self) -> DiskSnapshot:
        found = [(name, read_space(directory)) for name, directory in self._directories]
        return tuple((name, space) for name, space in found if space is not None)

    def render(self, snapshot: DiskSnapshot, out: Samples) -> None:
        for name, space in snapshot:
            out.add(AVAILABLE, space.available_bytes, group=name)
            out.add(SIZE, space.size_bytes, group=name)

    def describe(self, snapshot: DiskSnapshot, status: Status) -> None:
        for name, space in snapshot:
            status.filesystems.append(
                {"group": name, "available_bytes": space.available_bytes, "size_bytes": space.size_bytes}
            )
