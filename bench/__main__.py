"""Run the measurements: ``python -m bench [NAME...]``.

Each prints one line of JSON; exit status 1 when a goal is missed.
"""

import json
import sys
from collections.abc import Callable

from bench import eta, exits, exposition, files, gpus, kills, logs, plans, processes, sidecar, tail, wrapper
from bench.clock import Figures

BENCHES: dict[str, Callable[[], Figures]] = {
    "exposition": exposition.measure,
    "wrapper": wrapper.measure,
    "processes": processes.measure,
    "exits": exits.measure,
    "kills": kills.measure,
    "logs": logs.measure,
    "tail": tail.measure,
    "files": files.measure,
    "eta": eta.measure,
    "gpus": gpus.measure,
    "sidecar": sidecar.measure,
    "plans": plans.measure,
}


def main() -> int:
    """Exit status."""
    names = sys.argv[1:] or list(BENCHES)
    unknown = set(names) - set(BENCHES)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))} (known: {', '.join(BENCHES)})", file=sys.stderr)
        return 2
    missed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = BENCHES[name]()
        missed = missed or not all(found["goals"].values())
        print(json.dumps({"bench": name, **found}))
    return int(missed)


sys.exit(main())
