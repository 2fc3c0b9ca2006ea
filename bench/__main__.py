"""Run the measurements: ``python -m bench [NAME...]``, or compare two runs: ``python -m bench compare OLD NEW``.

Each prints one line of JSON; exit status 1 when a goal is missed, or was met in the old run alone.
"""

import importlib
import json
import signal
import sys

from bench.compare import compare

BENCHES = (
    *("exposition", "wrapper", "processes", "exits", "kills", "logs"),
    *("backlog", "tail", "files", "eta", "gpus", "sidecar", "series", "plans", "hub"),
)  # modules of this package
LONG = ("soak", "slurm_kills", "hub_rpcs", "prometheus")  # only by name: they take long, or need root


def main() -> int:
    """Exit status."""
    names = sys.argv[1:] or BENCHES
    if names[0] == "compare":
        if len(names) != 3:
            print("two files are needed: python -m bench compare OLD NEW", file=sys.stderr)
            return 2
        return compare(*names[1:])
    unknown = set(names) - {*BENCHES, *LONG}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))} (known: {', '.join((*BENCHES, *LONG))})", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no bench leaves its processes
    missed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = importlib.import_module(f"bench.{name}").measure()
        missed = missed or not all(found["goals"].values())
        print(json.dumps({"bench": name, **found}))
    return int(missed)


sys.exit(main())
