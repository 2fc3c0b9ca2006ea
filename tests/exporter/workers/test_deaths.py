"""Logs of real deaths of frameworks and engines, each with its exit reason and decisive line."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter.logs.lexicon_reader import build_lexicon
from exporter.workers.exit_reason import ExitEvidence, FailedPeer, find_exit_reason
from exporter.workers.log_evidence import log_evidence

LEXICON = build_lexicon()
HEADING = re.compile(r"^=== (.+) \| (.+) \| (\w+) \| (\w+) \| (.+)\n", re.MULTILINE)
PREFIXES = {
    "as logged": "",
    "time of a container": "2026-03-11T17:57:10.976518836Z ",
    "name of a container": "engine-1  | ",
    "rank": "[rank3]: ",
    "task of srun": "3: ",
    "rank of mpirun": "[1,0]<stderr>:",
}  # what programs that collect logs write before each line
LEARNT = {
    "node of pdsh": "gn01: ",
    "journal": "Mar 11 17:57:10 gn01 train[4711]: ",
    "zone": "2026-03-11 17:57:10 UTC ",
}  # the same, of no form that is known: it shows in tracebacks


@dataclass(frozen=True)
class Death:
    """One log, and what is to be found in it."""

    name: str
    source: str
    status: str
    reason: str
    line: str
    log: str

    def judge(self, prefix: str) -> tuple[str, bool]:
        """Return the reason, and whether the decisive line is the right one."""
        text = "".join(f"{prefix}{line}\n" for line in self.log.splitlines())
        number = getattr(signal, self.status, None)
        evidence = ExitEvidence(
            code=None if number else int(self.status),
            signal=number,
            end=100.0,
            log=log_evidence([("w.err", text.encode())], LEXICON),
            peer=FailedPeer("worker_w3", 99.0, "app_error") if self.reason == "terminated_peer" else None,
        )
        return find_exit_reason(evidence).reason, self.line in (evidence.log.line or "")


def read_deaths() -> list[Death]:
    _, *parts = HEADING.split((Path(__file__).parent / "deaths.txt").read_text("utf-8"))
    return [Death(*parts[at : at + 6]) for at in range(0, len(parts), 6)]


@pytest.mark.parametrize("prefix", [*PREFIXES.values(), *LEARNT.values()], ids=[*PREFIXES, *LEARNT])
def test_a_death_has_its_reason_and_its_decisive_line(prefix: str) -> None:
    deaths = read_deaths()
    if prefix in LEARNT.values():
        deaths = [death for death in deaths if "Traceback (most" in death.log and '  File "' in death.log]
    wrong = [
        f"{death.name}: {found} instead of {death.reason}, {'right' if is_right else 'wrong'} line"
        for death in deaths
        for found, is_right in [death.judge(prefix)]
        if (found, is_right) != (death.reason, True)
    ]
    print(f"{len(deaths) - len(wrong)} of {len(deaths)} deaths are judged right")
    assert len(deaths) >= 60
    assert not wrong, "\n".join(wrong)
