"""Hypothesis strategies: texts of users, manifests, logs, and the pieces in which a text can arrive."""

from pathlib import Path

from hypothesis import strategies as st

from exporter.contract.alert_thresholds import THRESHOLDS, AlertThreshold
from exporter.contract.manifest import DETAILS, LogPattern, Manifest, PathGroup, Task

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)  # any text that UTF-8 can hold
PATH_TEXT = st.text(
    st.characters(codec="utf-8") | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), max_size=30
)  # as above, with surrogates for bytes that are not UTF-8
NAME = st.from_regex(r"[a-z][a-z0-9_]{0,15}", fullmatch=True)
COUNT = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e9, allow_nan=False)

TASKS = st.builds(
    Task,
    worker=TEXT,
    role=TEXT,
    index=COUNT,
    rank=COUNT,
    local_rank=COUNT,
    node_index=COUNT,
    gpus=st.lists(st.integers(0, 15), max_size=8).map(tuple),
    logs=st.lists(PATH_TEXT, max_size=3).map(tuple),
)
GROUPS = st.builds(PathGroup, name=TEXT, directory=PATH_TEXT, pattern=st.none() | PATH_TEXT)
LOG_PATTERNS = st.builds(LogPattern, name=TEXT, pattern=TEXT, severity=st.none() | NAME)
ALERT_THRESHOLDS = st.builds(AlertThreshold, st.sampled_from(list(THRESHOLDS)), st.none() | SECONDS)
MANIFESTS = st.builds(
    Manifest,
    job_name=TEXT,
    user=TEXT,
    cluster=TEXT,
    partition=TEXT,
    nodes=COUNT,
    tasks=st.lists(TASKS, max_size=4).map(tuple),
    groups=st.lists(GROUPS, max_size=3).map(tuple),
    logs=st.none() | GROUPS,
    progress=st.lists(LOG_PATTERNS, max_size=3).map(tuple),
    errors=st.lists(LOG_PATTERNS, max_size=3).map(tuple),
    total_items=st.none() | COUNT,
    time_limit_s=st.none() | SECONDS,
    check_interval_s=SECONDS,
    launch_timeout_s=SECONDS,
    stall_timeout_s=SECONDS,
    linger_s=SECONDS,
    gpu_metrics=st.booleans(),
    detail=st.sampled_from(DETAILS),
    listen_address=TEXT,
    alert_thresholds=st.lists(ALERT_THRESHOLDS, max_size=2).map(tuple),
    run_dir=st.just(Path("/runs/1")),
)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    """The pieces of a text that is cut at these places, taken modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)  # where to `cut`
