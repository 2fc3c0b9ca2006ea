"""Options and fixtures shared by several folders of tests."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Under nohup or in the background of a script, pytest ignores these signals, and so would every
# process that tests start and end with them.
for _number, _action in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)

# The run history of one test job must not affect the next job with its name.
os.environ["GPUJOB_HISTORY_DIR"] = ""
# Likewise its place in the index of jobs, and its locks of outputs.
_STATE = tempfile.TemporaryDirectory(prefix="gpujob-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
# Nor do its tests see the queue of earlier ones, or a hub of this machine.
os.environ["XDG_CACHE_HOME"] = f"{_STATE.name}/cache"
os.environ["GPUJOB_HUB"] = "none"

# Small programs in Go, such as promtool, would collect garbage for a third of their time,
# and the lanes leave them one processor: with more, a seventh of their time is that of threads that look for work.
os.environ |= {"GOGC": "1000", "GOMAXPROCS": "1"}

# `python3` in jobs and fake commands is this interpreter: a shim of a version manager would start a shell each time.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
UPDATE_GOLDEN = "--update-golden"
HARD_NAMES = ("a space", 'a"quote', "a\nnewline", "a) b (", "node[01-03,7]", "back\\slash", "Übung 日本", "")

settings.register_profile("gpujob", deadline=None, max_examples=50)
settings.load_profile("gpujob")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(UPDATE_GOLDEN, action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption("--by-room", action="store_true", help="end with a table of tests and seconds by room")


WAITS = re.compile(
    r"\b(subprocess|Popen|sleep|socket|threading|aiohttp|wait_for|hanging|real_|mkfifo|fork|getrusage|seteuid|LocalJob"
    r"|tests\.bin|tests\.endtoend|soak)"
)
WITH_PARTS = ("endtoend", "realstack", "packaging", "docker", "gpu", "fakenvml", "engines", "examples", "alertmanager")


@cache
def _is_quick(path: Path) -> bool:
    """Whether, judging by its text, a test file starts no process or server and never sleeps."""
    return path.relative_to(TESTS).parts[0] not in WITH_PARTS and not WAITS.search(path.read_text(encoding="utf-8"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-quick`."""
    for item in items:
        if _is_quick(item.path) and not {"start", "slurm", "locked"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.quick)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tests and seconds of each room, the slowest room first."""
    if not config.getoption("--by-room"):
        return
    count, seconds = Counter[str](), dict[str, float]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                room = "/".join(Path(report.location[0]).parts[1:-1])
                seconds[room] = seconds.get(room, 0.0) + report.duration
                count[room] += report.when == "call"
    terminalreporter.section("by room")
    for room, spent in sorted(seconds.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"{spent:8.1f} s {count[room]:6d} tests  {room or 'tests'}")


@pytest.fixture(params=HARD_NAMES, ids=ascii)
def hard_name(request: pytest.FixtureRequest) -> str:
    """A hard name: spaces, quotes, newlines, brackets and so on."""
    name: str = request.param
    return name


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], Path]:
    """Compares a text with a file under ``tests/golden``; returns the path of the file."""

    def compare(name: str, text: str) -> Path:
        path = GOLDEN / name
        if request.config.getoption(UPDATE_GOLDEN):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"{path} is missing; write it with pytest {UPDATE_GOLDEN} and look at it")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; pytest {UPDATE_GOLDEN} writes it anew"
        return path

    return compare


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory that not even root can write to."""
    path = tmp_path / "locked"
    path.mkdir()
    if os.geteuid():
        path.chmod(0o555)
    elif subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable directories")
    yield path
    if os.geteuid():
        path.chmod(0o755)
    else:
        subprocess.run(["chattr", "-i", str(path)], check=True)
