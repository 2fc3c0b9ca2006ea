"""A user's benchmark, or any other work for when the workers are ready. Pure."""

import shlex

from launcher.jobfile.serving import BenchmarkSpec
from launcher.planner.backends.base import BackendContext, option_argv
from launcher.planner.benchmarks.base import Benchmark, Endpoint


class CustomBenchmark(Benchmark):
    """The command of the job file, with its input in variables."""

    name = "custom"
    needs_endpoint = False

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        return [*shlex.split(benchmark.command or ""), *option_argv(benchmark.args)]
