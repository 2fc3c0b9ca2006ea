"""The example workload, as real processes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import embed
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embed"
SCRIPT = FOLDER / "embed.py"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(INFO|WARNING)\] .+")
POSITION = re.compile(r"Processed (\d+)/(\d+) items")
RATE = re.compile(r"(\d+\.?\d*) items/s")
JOB_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GPUJOB_OUTPUT_DIR",
    "GPUJOB_CHECKPOINT_DIR",
    "GPUJOB_PROGRESS_FILE",
)
HARD = [
    "a space",
    'a"quote',
    "it's",
    "a\nnewline",
    "a) b (",
    "node[01-03,7]",
    "Übung 日本",
    "-n",
    "*?$HOME%s{rank}",
]

Start = Callable[..., subprocess.Popen[str]]


def environment(**values: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES} | values


def run(*options: object, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a worker to its end, with its files in ``cwd`` by default."""
    return subprocess.run(
        [sys.executable, "-u", str(SCRIPT), *map(str, options)],
        cwd=cwd,
        env=env or environment(GPUJOB_OUTPUT_DIR=str(cwd)),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers in the folder of the test. Leftover workers are killed at its end."""
    children: list[subprocess.Popen[str]] = []

    def start_worker(*options: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-u", str(SCRIPT), *map(str, options)],
            cwd=tmp_path,
            env=environment(GPUJOB_OUTPUT_DIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.append(child)
        return child

    yield start_worker
    for child in children:
        child.kill()
        child.communicate()


def output(folder: Path, rank: int = 0) -> Path:
    return folder / f"output_worker_{rank}.jsonl"


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    data = output(folder, rank).read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.splitlines()]


def positions(log: str) -> list[int]:
    return [int(done) for done, _ in POSITION.findall(log)]


def steps(folder: Path, rank: int = 0) -> list[int]:
    found = [re.fullmatch(rf"checkpoint_worker_{rank}_step_(\d+)\.json", path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in found if match)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """Output and log of an uninterrupted run of 300 items."""
    folder = tmp_path_factory.mktemp("whole")
    done = run("--items", 300, "--checkpoint-every", 50, cwd=folder)
    assert done.returncode == 0, done.stderr
    return output(folder).read_bytes(), done.stdout


# Results


def test_shards_are_disjoint_and_complete(tmp_path: Path) -> None:
    seen: list[int] = []
    for rank in range(3):
        done = run("--items", 100, cwd=tmp_path, env=environment(
            RANK=str(rank), WORLD_SIZE="3", GPUJOB_OUTPUT_DIR=str(tmp_path)))  # fmt: skip
        share = len(range(rank, 100, 3))
        assert done.stdout.splitlines()[-1].split("] ")[1].startswith(f"Processed {share}/{share} items (")
        ids = [record["id"] for record in records(tmp_path, rank)]
        assert ids == list(range(rank, 100, 3))
        seen += ids
    assert sorted(seen) == list(range(100))


def test_embeddings_have_length_one_and_the_nearest_is_an_earlier_item(full_run: tuple[bytes, str]) -> None:
    lines = [json.loads(line) for line in full_run[0].splitlines()]
    assert len(lines) == 300
    assert lines[0]["nearest"] is None
    vectors = {line["id"]: line["embedding"] for line in lines}
    for line in lines:
        assert len(line["embedding"]) == 64
        assert math.hypot(*line["embedding"]) == pytest.approx(1, abs=1e-4)
        if line["id"]:
            assert line["id"] - 32 <= line["nearest"] < line["id"]
            cosine = sum(map(math.prod, zip(line["embedding"], vectors[line["nearest"]], strict=True)))
            assert cosine == pytest.approx(line["similarity"], abs=1e-3)


def test_output_is_the_same_each_time_and_depends_on_the_seed(tmp_path: Path, full_run: tuple[bytes, str]) -> None:
    for name, seed in (("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        assert run("--items", 300, "--seed", seed, cwd=tmp_path / name).returncode == 0
    assert output(tmp_path / "again").read_bytes() == full_run[0]
    assert output(tmp_path / "other").read_bytes() != full_run[0]


def test_similar_passages_are_closer_than_unrelated_ones() -> None:
    corpus = embed.Corpus((), 512)
    passages = [corpus.passage(item)[0] for item in range(0, corpus.passages, corpus.passages // 40)]
    vectors = [embed.embed(text, 64, 0) for text in passages]
    for index, text in enumerate(passages):
        edited = embed.embed(text.replace("e", "E")[:440], 64, 0)
        others = [embed.cosine(edited, other) for at, other in enumerate(vectors) if at != index]
        assert embed.cosine(edited, vectors[index]) > max(others)


@pytest.mark.parametrize("text", ["", " \n\t", "a", "ab", "abcd", "日本語", "\x00", "e" * 600])
@pytest.mark.parametrize("dim", [1, 2, 64])
def test_any_text_has_an_embedding_of_length_one(text: str, dim: int) -> None:
    assert math.hypot(*embed.embed(text, dim, 7)) == pytest.approx(1)


def test_passages_repeat_with_new_ids_when_items_exceed_them(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "b.txt").write_text("é" * 40)  # 80 bytes: two passages of 33 bytes, cut inside a character
    (texts / "a.txt").write_text("short")
    (texts / "link.txt").symlink_to("a.txt")
    (texts / "binary").write_bytes(b"\0\1")
    (texts / "empty").touch()
    os.mkfifo(texts / "pipe")
    done = run("--corpus", texts, "--passage-bytes", 33, "--items", 7, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    assert [record["id"] for record in found] == list(range(7))
    cycle = ["texts/a.txt:0", "texts/b.txt:0", "texts/b.txt:33"]
    assert [record["source"] for record in found] == [*cycle, *cycle, cycle[0]]
    assert found[3]["embedding"] == found[0]["embedding"]
    assert found[3]["similarity"] == pytest.approx(1)


def test_a_shard_without_items_completes(tmp_path: Path) -> None:
    done = run("--items", 1, "--shard", 1, "--shards", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert positions(done.stdout) == [0]
    assert records(tmp_path, 1) == []


def test_it_needs_only_the_standard_library(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(SCRIPT), "--items", "20"]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=30)
    assert len(records(tmp_path / "embed-out")) == 20


@pytest.mark.parametrize("name", HARD)
def test_folders_may_have_any_name(tmp_path: Path, name: str) -> None:
    texts = tmp_path / name
    texts.mkdir()
    (texts / name).write_text("Some text to embed. " * 20)
    out, checkpoints = texts / f"out {name}", texts / f"checkpoints {name}"
    options = ("--items", 9, f"--output-dir={out}", f"--checkpoint-dir={checkpoints}", "--passage-bytes", 64)
    done = run(*options, "--corpus", texts, "--fail-at", 4, "--checkpoint-every", 3, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    done = run(*options, "--corpus", texts, cwd=tmp_path)
    assert "Resuming at 3/9 items from checkpoint_worker_0_step_3.json" in done.stdout
    assert len(records(out)) == 9
    assert steps(checkpoints) == [3, 9]


# Log


def test_log_lines_have_time_level_position_and_rate(full_run: tuple[bytes, str]) -> None:
    lines = full_run[1].splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    progress = [line for line in lines if POSITION.search(line)]
    found = positions("\n".join(progress))
    assert [done for done in found if done % 100 == 0] == [100, 200, 300]  # others a second after the line before
    assert found == sorted(set(found))
    assert all(float(RATE.search(line)[1]) > 0 for line in progress)  # type: ignore[index]
    assert re.search(r" \[INFO\] Processed 300/300 items \(\d+\.\d items/s\)$", lines[-1])


def test_slow_work_is_logged_each_second_and_respects_the_rate(tmp_path: Path) -> None:
    before = time.monotonic()
    log = run("--items", 5, "--rate", 3, cwd=tmp_path).stdout
    assert time.monotonic() - before >= 4 / 3
    assert len(positions(log)) >= 2
    assert float(RATE.findall(log)[-1]) <= round(5 / (4 / 3), 1)


def test_the_output_file_is_never_behind_the_log(tmp_path: Path, start: Start) -> None:
    child = start("--items", 120, "--rate", 200, "--log-every", 10)
    assert child.stdout is not None
    sizes = []
    for line in child.stdout:
        for done in positions(line):
            data = output(tmp_path).read_bytes()
            assert data.count(b"\n") >= done
            sizes.append(len(data))
    assert child.wait(10) == 0
    assert len(set(sizes)) > 3
    assert len(records(tmp_path)) == 120


# Checkpoints and resuming


def test_two_checkpoints_with_the_output_size_are_kept(tmp_path: Path) -> None:
    assert run("--items", 100, "--checkpoint-every", 30, cwd=tmp_path).returncode == 0
    assert steps(tmp_path) == [90, 100]
    data = output(tmp_path).read_bytes()
    for done in (90, 100):
        record = json.loads((tmp_path / f"checkpoint_worker_0_step_{done}.json").read_text())
        assert record["done"] == done
        assert data[: record["output_bytes"]].count(b"\n") == done
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_resume_after_a_failure_inside_a_write_gives_the_same_bytes(
    tmp_path: Path, full_run: tuple[bytes, str]
) -> None:
    options = ("--items", 300, "--checkpoint-every", 50)
    assert run(*options, "--fail-at", 130, cwd=tmp_path).returncode == 1
    with open(output(tmp_path), "ab") as torn:  # the rest of an interrupted write
        torn.write(full_run[0].splitlines()[130][:77])
    (tmp_path / ".checkpoint_worker_0_step_150.json.tmp").write_text("{")
    done = run(*options, cwd=tmp_path)
    assert "[INFO] Resuming at 100/300 items from checkpoint_worker_0_step_100.json" in done.stdout
    logged = positions(done.stdout)  # on a busy machine, also one each second
    assert (logged[0] > 100, set(logged) >= {200, 300}, logged == sorted(logged)) == (True, True, True)
    assert output(tmp_path).read_bytes() == full_run[0]
    assert not list(tmp_path.glob(".*"))


def test_kills_at_any_time_give_the_same_bytes(tmp_path: Path, start: Start, full_run: tuple[bytes, str]) -> None:
    for wait in (0.03, 0.17, 0.21, 0.26, 0.31):
        child = start("--items", 300, "--checkpoint-every", 20, "--rate", 600)
        time.sleep(wait)
        child.kill()
        child.wait()
        if output(tmp_path).exists():
            *whole, last = output(tmp_path).read_bytes().split(b"\n")
            assert whole == full_run[0].split(b"\n")[: len(whole)]
            assert full_run[0].split(b"\n")[len(whole)].startswith(last)
    assert run("--items", 300, cwd=tmp_path).returncode == 0
    assert output(tmp_path).read_bytes() == full_run[0]


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path: Path, full_run: tuple[bytes, str]) -> None:
    options = ("--items", 300, "--checkpoint-every", 50)
    run(*options, "--fail-at", 130, cwd=tmp_path)
    (tmp_path / "checkpoint_worker_0_step_100.json").write_bytes(b'{"done": 100\xff')
    done = run(*options, cwd=tmp_path)
    assert "[WARNING] Cannot resume from checkpoint_worker_0_step_100.json: it is damaged" in done.stdout
    assert "Resuming at 50/300 items from checkpoint_worker_0_step_50.json" in done.stdout
    assert output(tmp_path).read_bytes() == full_run[0]


@pytest.mark.parametrize("cut", [0, 1000, None])
def test_output_shorter_than_its_checkpoint_is_written_again(tmp_path: Path, cut: int | None) -> None:
    assert run("--items", 60, cwd=tmp_path).returncode == 0
    whole = output(tmp_path).read_bytes()
    if cut is None:
        output(tmp_path).unlink()
    else:
        os.truncate(output(tmp_path), cut)
    done = run("--items", 60, cwd=tmp_path)
    assert "Cannot resume from" in done.stdout
    assert output(tmp_path).read_bytes() == whole


def test_checkpoints_of_other_options_are_not_resumed_and_removed(tmp_path: Path) -> None:
    assert run("--items", 90, cwd=tmp_path).returncode == 0
    done = run("--items", 80, "--checkpoint-every", 30, cwd=tmp_path)
    assert "Cannot resume from checkpoint_worker_0_step_90.json: it is of other options" in done.stdout
    assert len(records(tmp_path)) == 80
    assert steps(tmp_path) == [60, 80]


def test_a_completed_shard_completes_again_immediately(tmp_path: Path) -> None:
    assert run("--items", 40, cwd=tmp_path).returncode == 0
    before = output(tmp_path).stat().st_mtime_ns, output(tmp_path).read_bytes()
    done = run("--items", 40, cwd=tmp_path)
    assert "Resuming at 40/40 items" in done.stdout
    assert positions(done.stdout) == [40]
    assert (output(tmp_path).stat().st_mtime_ns, output(tmp_path).read_bytes()) == before


def test_fresh_starts_with_the_first_item(tmp_path: Path) -> None:
    assert run("--items", 40, cwd=tmp_path).returncode == 0
    done = run("--items", 40, "--fresh", "--log-every", 10, cwd=tmp_path)
    assert "Resuming" not in done.stdout
    found = positions(done.stdout)
    assert set(found) >= {10, 20, 30, 40}  # on a busy machine, also one each second
    assert (found, found[0] <= 10) == (sorted(found), True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_ends_the_worker(
    tmp_path: Path, start: Start, full_run: tuple[bytes, str], number: signal.Signals
) -> None:
    child = start("--items", 300, "--rate", 150, "--log-every", 10)
    assert child.stdout is not None
    while "Processed 50/" not in child.stdout.readline():
        pass
    child.send_signal(number)
    log, _ = child.communicate(timeout=10)
    assert child.returncode == -number
    assert f"Received {number.name}, stopping with a checkpoint" in log
    (step,) = steps(tmp_path)
    assert positions(log)[-1] == step == len(records(tmp_path))
    done = run("--items", 300, cwd=tmp_path)
    assert f"Resuming at {step}/300 items" in done.stdout
    assert output(tmp_path).read_bytes() == full_run[0]


# Failures


def test_a_failure_happens_at_its_item_in_its_shard(tmp_path: Path) -> None:
    options = ("--items", 80, "--shards", 2, "--fail-at", 51)
    assert run(*options, "--shard", 0, cwd=tmp_path).returncode == 0
    done = run(*options, "--shard", 1, cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"Traceback \(most recent[\s\S]+\nRuntimeError: cannot embed item 51: --fail-at", done.stderr)
    assert len(records(tmp_path, 1)) == 25


# Options


def test_options_override_the_environment(tmp_path: Path) -> None:
    env = environment(RANK="7", WORLD_SIZE="8", GPUJOB_OUTPUT_DIR="/nonexistent/a", GPUJOB_CHECKPOINT_DIR="c")
    done = run("--items", 10, "--shard", 1, "--shards", 2, "--output-dir", "o", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert [record["id"] for record in records(tmp_path / "o", 1)] == [1, 3, 5, 7, 9]
    assert steps(tmp_path / "c", 1) == [5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--items", "0"], "'0' is not a whole number of at least 1"),
        (["--items", "many"], "'many' is not a whole number"),
        (["--rate", "0"], "'0' is not a number of at least 0.001"),
        (["--rate", "nan"], "'nan' is not a number of at least 0.001"),
        (["--fail-at", "1000"], "--fail-at: there is no item 1000, the last one is 999"),
        (["--shard", "2", "--shards", "2"], "there is no shard 2"),
        (["--item", "5"], "unrecognized arguments"),
        (["--corpus", "/nonexistent"], "'/nonexistent' is not a file or folder"),
        (["--corpus", "/dev/null"], "'/dev/null' is not a file or folder"),
        (["--output-dir", "/dev/null/x"], "Not a directory: '/dev/null/x'"),
    ],
)
def test_a_bad_option_is_a_clear_error(tmp_path: Path, options: list[str], message: str) -> None:
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_bad_environment_is_a_clear_error(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, env=environment(RANK="first"))
    assert done.returncode == 2
    assert "--shard: 'first' is not a whole number of at least 0" in done.stderr


# The progress file


def read_updates(path: Path) -> list[dict[str, Any]]:
    """Updates in a progress file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_progress_file_has_the_positions_of_the_log(tmp_path: Path) -> None:
    done = run("--items", 60, "--log-every", 20, "--progress-file", "told.jsonl", cwd=tmp_path)
    positions_in_file = [(update["done"], update["total"]) for update in read_updates(tmp_path / "told.jsonl")]
    assert positions_in_file == [tuple(map(int, position)) for position in POSITION.findall(done.stdout)]
    assert positions_in_file[-1] == (60, 60)


def test_the_progress_file_of_the_launcher_is_used_on_request(tmp_path: Path) -> None:
    variables = environment(GPUJOB_OUTPUT_DIR=str(tmp_path), GPUJOB_PROGRESS_FILE=str(tmp_path / "told.jsonl"))
    assert run("--items", 5, cwd=tmp_path, env=variables).returncode == 0
    assert not (tmp_path / "told.jsonl").exists()
    assert run("--items", 5, "--fresh", "--progress-file", cwd=tmp_path, env=variables).returncode == 0
    assert read_updates(tmp_path / "told.jsonl")[-1]["done"] == 5


def test_a_resume_is_in_the_progress_file(tmp_path: Path) -> None:
    options = ("--items", 60, "--checkpoint-every", 20)
    run(*options, "--fail-at", 40, cwd=tmp_path)
    run(*options, "--progress-file", "told.jsonl", cwd=tmp_path)
    first, *later = read_updates(tmp_path / "told.jsonl")
    assert first == {"done": 40, "total": 60, "resumed": True}
    assert not any("resumed" in update for update in later)


def test_an_unnamed_or_unwritable_progress_file_is_an_error(tmp_path: Path) -> None:
    done = run("--items", 5, "--progress-file", cwd=tmp_path)
    assert (done.returncode, "there is none in GPUJOB_PROGRESS_FILE" in done.stderr) == (2, True)
    done = run("--items", 5, "--progress-file", "no/told.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "embed.py: error: [Errno 2] No such file or directory: 'no/told.jsonl'" in done.stderr


def test_help_has_an_example(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "\nexample: " in done.stdout
    assert "--items 100\n" in done.stdout


# Job files


@pytest.mark.parametrize("name", ["job.yaml", "slurm.yaml"])
def test_job_files_agree_with_their_command(name: str) -> None:
    job = yaml.safe_load((FOLDER / name).read_text())
    (role,) = job["workers"]
    python, script, *options = role["command"].split()
    assert (python, script) == ("python3", "{job_dir}/embed.py")
    parsed = embed.parse_options(options, {"RANK": "0", "WORLD_SIZE": str(role["count"])})
    assert parsed.items == job["progress"]["total_items"]
    assert role["count"] * role["gpus"] <= job["resources"]["nodes"] * job["resources"]["gpus_per_node"]
    assert Path("output_worker_0.jsonl").match(job["patterns"]["output"])
    assert Path("checkpoint_worker_0_step_250.json").match(job["patterns"]["checkpoints"])
