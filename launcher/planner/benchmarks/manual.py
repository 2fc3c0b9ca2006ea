"""No benchmark: the job serves until it is stopped. Pure."""

from launcher.planner.benchmarks.base import Benchmark


class ManualBenchmark(Benchmark):
    """Starts nothing."""

    name = "manual"
    needs_endpoint = False
