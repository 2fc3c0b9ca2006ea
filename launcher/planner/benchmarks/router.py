"""AIPerf against the router, with one profile for each concurrency. Pure.

Options: https://github.com/ai-dynamo/aiperf
"""

import shlex

from launcher.jobfile.serving import BenchmarkSpec
from launcher.planner.backends.base import BackendContext, option_argv
from launcher.planner.benchmarks.base import Benchmark, Endpoint, concurrency_text

_EACH = (
    'for each in $0; do "$@" --concurrency "$each" --artifact-dir "$GPUJOB_RESULT_DIR/concurrency_$each" || exit; done'
)


class RouterBenchmark(Benchmark):
    """``aiperf profile``, or the job file's program with the same options."""

    name = "router"
    shell_prefix_length = 4

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        words = ["bash", "-c", _EACH, concurrency_text(benchmark, " ")]
        words += shlex.split(benchmark.command or "aiperf profile")
        words += ["--model", context.model_name]
        if context.spec.model is not None:
            words += ["--tokenizer", context.model_path]
        if endpoint is not None:
            words += ["--url", endpoint.url]
        words += ["--endpoint-type", "chat", "--streaming"]
        words += ["--synthetic-input-tokens-mean", str(benchmark.isl), "--output-tokens-mean", str(benchmark.osl)]
        if benchmark.req_rate != "inf":
            words += ["--request-rate", str(benchmark.req_rate)]
        return words + option_argv(benchmark.args)

    def result_dir(self, benchmark: BenchmarkSpec) -> str:
        return "artifacts"
