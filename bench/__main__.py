"""Run the measurements: ``python -m bench [NAME...]``.

Each prints one line of JSON; exit status 1 when a goal is missed.
"""

import importlib
import json
import sys

BENCHES = (
    *("exposition", "wrapper", "processes", "exits", "kills", "logs"),
    *("backlog", "tail", "files", "eta", "gpus", "sidecar", "series", "plans", "hub"),
)  # modules of this package
LONG = ("soak", "slurm_kills", "hub_rpcs")  # only by name: they take long, or need root


def main() -> int:
    """Exit status."""
    names = sys.argv[1:] or BENCHES
    unknown = set(names) - {*BENCHES, *LONG}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))} (known: {', '.join((*BENCHES, *LONG))})", file=sys.stderr)
        return 2
    missed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = importlib.import_module(f"bench.{name}").measure()
        missed = missed or not all(found["goals"].values())
        print(json.dumps({"bench": name, **found}))
    return int(missed)


sys.exit(main())
