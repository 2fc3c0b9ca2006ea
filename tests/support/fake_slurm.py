"""Control of the fake Slurm commands in ``tests/bin``."""

import json
import os
from pathlib import Path
from typing import Any

from tests.support.launcher import ROOT, clean_environment

BIN = ROOT / "tests" / "bin"
# for shell scripts in place of squeue and sacct: prints rows, separated and ended as the arguments say
PRINT_ROWS = """for last; do :; done
rows() { case $last in
--delimiter=*) sed "s/|/${last#*=}/g" ;;
*) sed "s/|$/${last##*:}/" ;;
esac; }
"""


class FakeSlurm:
    """A folder where the fake commands record their calls and find their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def environment(self, **over: str) -> dict[str, str]:
        """An environment in which the fake commands are found first."""
        own = {
            "FAKE_SLURM": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        path = os.pathsep.join((str(self.folder / "bin"), str(BIN), os.environ["PATH"]))
        return clean_environment(PATH=path, **own | over)

    def replace(self, command: str, script: str) -> None:
        """Let a shell script answer as this command."""
        path = self.folder / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def say(self, command: str, what: str, text: str | int) -> None:
        """Set the ``out``, ``err``, ``status`` or ``sleep`` of a command.

        Another queue is seen at once: commands then have no earlier answer to share.
        """
        if (command, what) == ("squeue", "out"):
            for path in self.folder.glob("cache/gpujob/*.json"):
                path.unlink()
        (self.folder / f"{command}.{what}").write_text(str(text))

    def calls(self, command: str | None = None) -> list[dict[str, Any]]:
        """The calls so far, oldest first."""
        path = self.folder / "calls.jsonl"
        recorded = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in recorded if command in (None, call["command"])]
