"""Entries of a checkpoint folder as values, including hostile ones."""

from hypothesis import strategies as st

from exporter.contract.status import DamagedFile
from exporter.files.checkpoints.entries import CheckpointEntry, CheckpointFile, CheckpointIndex
from tests.exporter.files.checkpoints.checkpoint_trees import START

ANY_NAME = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0") | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    min_size=1,
    max_size=40,
)
PIECES = st.sampled_from(
    [
        *(
            "checkpoint",
            "_",
            "-",
            ".",
            "12",
            "0",
            "00001-of-00004",
            "rank",
            "step",
            "epoch=",
            "=",
            ".pt",
            ".tmp",
            "last",
        ),
        *(".index.json", "\n", "99999999999999999999", "-of-", "999999999", "zero_pp_rank_", "__0_1.distcp", "²", "٣"),
        *("_world_size_", ".done", ".metadata", "1e400", "0.5", "tmp-", "w3"),
    ]
)
HOSTILE = st.lists(PIECES, min_size=1, max_size=8).map("".join) | ANY_NAME


@st.composite
def entries(draw: st.DrawFn) -> CheckpointEntry:
    name, inode = draw(HOSTILE), draw(st.integers(1, 20))
    directory = draw(st.booleans())
    inner = draw(st.lists(HOSTILE, max_size=4)) if directory else [""]
    files = tuple(
        CheckpointFile(
            f"{name}/{path}" if path else name,
            draw(st.integers(0, 1 << 40)),
            draw(st.floats(START - 100, START + 4000)),
            inode,
            draw(st.booleans()) if directory else False,
        )
        for path in inner
    )
    bad = draw(st.booleans())
    return CheckpointEntry(
        name,
        draw(st.just(name) | HOSTILE),
        draw(st.booleans()),
        directory,
        inode,
        files,
        draw(st.booleans()),
        tuple(CheckpointIndex(f"{name}/i.index.json", (shard,)) for shard in draw(st.lists(HOSTILE, max_size=3))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        tuple(DamagedFile(file.path, None, "is cut") for file in files[:1] if bad),
    )
