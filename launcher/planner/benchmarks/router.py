"""AIPerf against the router, with one profile for each concurrency. Pure.

Options: https://github.com/ai-dynamo/aiperf
"""

import shlex

from launcher.jobfile.serving import BenchmarkSpec
from launcher.planner.backends.base import BackendContext, option_words
from launcher.planner.benchmarks.base import Benchmark, Endpoint, concurrency_word

_EACH = (
    'for each in $0; do "$@" --concurrency "$each" --artifact-dir "$GPUJOB_RESULT_DIR/concurrency_$each" || exit; done'
)


class RouterBenchmark(Benchmark):
    """``aiperf profile``, or the job file's program with the same options."""

    name = "router"
    wrapping = 4

    def words(self, setting: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        words = ["bash", "-c", _EACH, concurrency_word(benchmark, " ")]
        words += shlex.split(benchmark.command or "aiperf profile")
        words += ["--model", setting.model_name]
        if setting.spec.model is not None:
            words += ["--tokenizer", setting.model_path]
        if endpoint is not None:
            words += ["--url", endpoint.url]
        words += ["--endpoint-type", "chat", "--streaming"]
        words += ["--synthetic-input-tokens-mean", str(benchmark.isl), "--output-tokens-mean", str(benchmark.osl)]
        if benchmark.req_rate != "inf":
            words += ["--request-rate", str(benchmark.req_rate)]
        return words + option_words(benchmark.args)

    def result_dir(self, benchmark: BenchmarkSpec) -> str:
        return "artifacts"
