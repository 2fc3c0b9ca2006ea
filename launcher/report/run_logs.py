"""The ends of a run's logs: evidence of the exit reason, and the last position."""

import os
from functools import partial

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.log_files_reader import extra_log_finder, log_paths, progress_path, read_first_bytes, read_last_bytes
from exporter.logs.log_starts_reader import read_log_starts
from exporter.logs.search.findings import ActivityMark, LogPosition
from exporter.progress import progress_file
from exporter.progress.track import ProgressTrack, items_of_rank
from exporter.workers.exit_reason import LogEvidence
from exporter.workers.log_evidence import log_evidence

LOG_TAIL_BYTES = 64 * 1024


class RunLogs:
    """Reads the logs of an attempt's runs. Thousands may end at once, so it finds what all need only once."""

    def __init__(self, manifest: Manifest, attempt: int) -> None:
        self._manifest, self._attempt = manifest, attempt
        self._lexicon = lexicon_of_job(manifest)
        self._others = extra_log_finder(manifest, partial(rank_in_file_name, ranks=manifest.ranks_of_roles()))

    def read_evidence(self, task: Task, restart: int, node: str, since: float | None) -> LogEvidence:
        """Evidence of the exit reason in the logs of a run that started at ``since``."""
        stem = run_files.record_name(task.worker, task.rank, self._attempt, restart)
        starts = read_log_starts(self._manifest.run_dir / run_files.WORKERS_DIR / f"{stem}.logs.json")
        paths = self._find_logs(task, restart, node, since)
        ends = [(os.path.basename(path), read_last_bytes(path, LOG_TAIL_BYTES, starts.get(path))) for path in paths]
        return log_evidence(ends, self._lexicon)

    def last_position(
        self, task: Task, restart: int, node: str, since: float | None
    ) -> tuple[int, int | None, str] | None:
        """Final position, total and unit from a task's logs and progress file; None if they contain no position.

        ``since`` is the start of this run. Older files that match the job's own log pattern belong to other runs.
        """
        manifest, lexicon = self._manifest, self._lexicon
        paths = self._find_logs(task, restart, node, since)
        ends = {path: read_last_bytes(path, LOG_TAIL_BYTES) for path in paths}
        pack = lexicon.choose_pack(*(read_first_bytes(path, LOG_TAIL_BYTES) for path in paths), *ends.values())
        tasks = [(of.role, of.worker, of.rank, of.critical) for of in manifest.tasks]
        track = ProgressTrack(
            lexicon.preferred_positions(pack),
            epoch_bases={**lexicon.epoch_bases(pack), progress_file.PATTERN: 0},
            epochs=manifest.total_epochs,
            steps=manifest.total_steps,
            share=items_of_rank(manifest.total_items, tasks, task.rank),
        )
        for path, text in ends.items():
            for moment, position in enumerate(lexicon.engine(pack).scan(text).positions):
                track.update(path, position, float(moment))
        own = progress_path(task, manifest.run_dir, node, self._attempt, restart)
        progress = progress_file.parse_updates(read_last_bytes(own, LOG_TAIL_BYTES), 0)
        in_order: list[LogPosition | ActivityMark] = [*progress.positions, *progress.marks]
        for moment, record in enumerate(sorted(in_order, key=lambda record: record.offset)):
            if isinstance(record, ActivityMark):
                track.apply_activity(record, float(moment))
            else:
                track.update(own, record, float(moment), order=1)
        if track.done is None or track.unit is None:
            return None
        return int(track.done), None if track.total is None else int(track.total), track.unit

    def _find_logs(self, task: Task, restart: int, node: str, since: float | None) -> tuple[str, ...]:
        """The logs of a run: its own, and those of the job's log pattern that have its rank in their names."""
        own = log_paths(task, self._manifest.run_dir, node, self._attempt, restart)
        others = self._others.find_since(since, [task.rank]) if self._others is not None else {}
        return (*own, *others.get(task.rank, ()))
