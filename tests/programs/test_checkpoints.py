"""The verdict on checkpoints that the libraries wrote, whole and with damage at random places."""

import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.launcher.verify.test_checkpoint_damage import DAMAGES, damaged, judge

BIN = Path(os.environ["GPUJOB_PROGRAMS"], "bin")
SCRIPT = Path(__file__).with_name("scripts") / "checkpoints.py"
CASES = 600
# pickles, whose end proves nothing, OCDBT, whose list of files is compressed, and formats of one library
UNDECIDED = ("pickle", "joblib", "orbax", "lightgbm", "xgboost ubj")
UNDETECTABLE = ("/raw/", "commit_success.txt")  # values without a checksum, and a mark


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for step in (100, 200):
        subprocess.run([BIN / "python", SCRIPT, folder, str(step)], check=True, timeout=1800)  # most of it imports
    return folder


def test_whole_checkpoints_are_no_alarm(written: Path) -> None:
    for kind in sorted(os.listdir(written)):
        found = judge(written / kind).checkpoint
        expected = None if kind in UNDECIDED else True
        assert (found.state, found.valid) == ("complete", expected), (kind, found.reason)


def test_damaged_checkpoints_are_never_whole(written: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance, table = random.Random(seed), Counter[tuple[str, str, str]]()
    for _ in range(CASES):
        kind, damage = chance.choice(sorted(os.listdir(written))), chance.choice(DAMAGES)
        work = Path(shutil.copytree(written / kind, tmp_path / kind))
        newest = sorted(path for path in work.rglob("*") if path.is_file() and "200" in str(path.relative_to(work)))
        path = chance.choice(newest)
        before, facts = path.read_bytes(), path.stat()
        after = damaged(before, damage, chance)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        found = judge(work).checkpoint
        is_newest = "200" in found.name
        verdict = "whole" if found.valid else "cannot tell" if found.state == "complete" else str(found.state)
        table[kind, damage, verdict if is_newest else "gone"] += 1
        name = f"/{path.relative_to(work)}"
        if is_newest and found.valid and before != after and not any(place in name for place in UNDETECTABLE):
            pytest.fail(f"seed {seed}: {kind}, {name} {damage}: called whole")
        shutil.rmtree(work)
    print(f"seed {seed}", *(f"{', '.join(case)}: {count}" for case, count in sorted(table.items())), sep="\n")
