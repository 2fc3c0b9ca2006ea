"""Reasons to doubt a checkpoint in which no damage was found."""

from collections.abc import Sequence

from exporter.files.checkpoints.entries import FROM_EARLIER_JOB
from exporter.files.checkpoints.history import CheckpointHistory
from exporter.files.checkpoints.names import is_part
from exporter.files.checkpoints.sets import CheckpointSet


def doubt(
    found: CheckpointSet, history: CheckpointHistory, unusual: Sequence[str], *, began_earlier: bool
) -> str | None:
    """Why a checkpoint of which all files are checked and none is damaged may not be whole; None if all is proven.

    ``unusual`` are shards that all similar checkpoints had. ``began_earlier`` means that an earlier job may have
    written some of it.
    """
    if found.unfinished_mark is not None:
        return f"{found.unfinished_mark} says that its writer has not finished it"
    entries = [entry for entry in found.entries.values() if not entry.name.marker]
    # notes beside it, such as `checkpoint_500.yaml`, need no proof
    parts = [entry for entry in entries if entry.view.is_directory or is_part(entry.view.bare)]
    seen = [entry.view for entry in parts or entries]
    for part in (part for entry in seen for part in entry.unproven):
        return f"{part.file}: {part.reason}"
    if not all(entry.is_fully_read for entry in seen):
        return "not all of its files could be read"
    if began_earlier and (found.shard_gaps or found.rank_gaps):
        return FROM_EARLIER_JOB
    if found.rank_gaps and not history.omits_on_purpose(found.key, found.shapes):
        return f"{found.rank_gaps[0]} may be missing"
    if found.optional_gap is not None:
        return f"{found.optional_gap} may be missing"
    if text := unusual_text((*unusual, *sorted(history.usual_parts(found.key) - found.parts))):
        return text
    if found.lacks_weights:
        return "has no file of weights"
    if found.open_rank is not None and not history.had_same(found.key, found.shapes):
        return f"nothing states how many files like {found.open_rank} there must be"
    return None if any(entry.valid for entry in seen) else "no file in it shows whether it is complete"


def unusual_text(unusual: Sequence[str]) -> str | None:
    """Describe the absent files for a person."""
    if not unusual:
        return None
    if len(unusual) == 1:
        return f"has no {unusual[0]}, unlike earlier checkpoints"
    return f"{len(unusual)} files that earlier checkpoints had are missing: {unusual[0]}, ..."
