"""sa-bench: a program that takes the concurrencies and writes a result file for each. Pure.

No package of that name is reliable, so the job file names the program.
"""

import shlex

from launcher.jobfile.serving import BenchmarkSpec
from launcher.planner.backends.base import BackendContext, option_argv
from launcher.planner.benchmarks.base import Benchmark, Endpoint, concurrency_text

_MAKE_FOLDER = 'mkdir -p -- "$0" && exec "$@"'


class SaBenchmark(Benchmark):
    """The user's program, with options from the job file and a directory for its results."""

    name = "sa-bench"
    shell_prefix_length = 4

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        folder = f"{{run_dir}}/{self.result_dir(benchmark)}"
        words = ["bash", "-c", _MAKE_FOLDER, folder, *shlex.split(benchmark.command or "")]
        if endpoint is not None:
            words += ["--host", endpoint.host, "--port", endpoint.port_text]
        if context.model_name:
            words += ["--model", context.model_name]
        words += ["--isl", str(benchmark.isl), "--osl", str(benchmark.osl)]
        words += ["--concurrencies", concurrency_text(benchmark), "--req-rate", str(benchmark.req_rate)]
        return [*words, "--result-dir", folder, *option_argv(benchmark.args)]

    def result_dir(self, benchmark: BenchmarkSpec) -> str:
        return f"sa-bench_isl_{benchmark.isl}_osl_{benchmark.osl}"
