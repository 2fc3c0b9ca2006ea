"""Benchmarks of a serving job: how to run each kind. Pure."""

import shlex

from exporter.contract.lazy_dataclass import dataclass
from launcher.jobfile.serving import BenchmarkSpec, concurrency_list
from launcher.planner.backends.base import BackendContext, option_argv


@dataclass(frozen=True)
class Endpoint:
    """Node (by index) and port (before the job's offset) that take clients' requests; as text with placeholders."""

    node: int
    port: int

    @property
    def host(self) -> str:
        return f"{{host_{self.node}}}"

    @property
    def port_text(self) -> str:
        return f"{{port_{self.port}}}"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port_text}"


class Benchmark:
    """How to run one kind of benchmark. This one starts nothing: the job serves until it is stopped."""

    name = "manual"
    needs_endpoint = False  # it needs a server to send requests to
    shell_prefix_length = 0  # words before its own program: the shell and the text that start it

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        """Command with placeholders."""
        raise NotImplementedError

    def result_dir(self, benchmark: BenchmarkSpec) -> str | None:
        """Directory for its results, within the run directory."""
        return None


class CustomBenchmark(Benchmark):
    """The command of the job file, or any other work for when the workers are ready; its input is in variables."""

    name = "custom"

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        return [*shlex.split(benchmark.command or ""), *option_argv(benchmark.args)]


class SaBenchmark(Benchmark):
    """The user's program, which takes the concurrencies and writes a result file for each.

    No package of that name is reliable, so the job file names the program.
    """

    name = "sa-bench"
    needs_endpoint = True
    shell_prefix_length = 4

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        folder = f"{{run_dir}}/{self.result_dir(benchmark)}"
        words = ["bash", "-c", 'mkdir -p -- "$0" && exec "$@"', folder, *shlex.split(benchmark.command or "")]
        if endpoint is not None:
            words += ["--host", endpoint.host, "--port", endpoint.port_text]
        if context.model_name:
            words += ["--model", context.model_name]
        words += ["--isl", str(benchmark.isl), "--osl", str(benchmark.osl)]
        words += ["--concurrencies", concurrency_text(benchmark), "--req-rate", str(benchmark.req_rate)]
        return [*words, "--result-dir", folder, *option_argv(benchmark.args)]

    def result_dir(self, benchmark: BenchmarkSpec) -> str:
        return f"sa-bench_isl_{benchmark.isl}_osl_{benchmark.osl}"


_EACH = (
    'for each in $0; do "$@" --concurrency "$each" --artifact-dir "$GPUJOB_RESULT_DIR/concurrency_$each" || exit; done'
)


class RouterBenchmark(Benchmark):
    """``aiperf profile`` for each concurrency, or the job file's program with the same options.

    Options: https://github.com/ai-dynamo/aiperf
    """

    name = "router"
    needs_endpoint = True
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


BENCHMARKS = {kind.name: kind for kind in (Benchmark(), CustomBenchmark(), SaBenchmark(), RouterBenchmark())}


def concurrency_text(benchmark: BenchmarkSpec, separator: str = "x") -> str:
    """The concurrencies as one word."""
    return separator.join(map(str, concurrency_list(benchmark.concurrencies)))


def benchmark_environment(
    context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None
) -> dict[str, str]:
    """Variables that describe the job to a benchmark; variables without a value are left out."""
    folder = BENCHMARKS[benchmark.type].result_dir(benchmark)
    found = {
        "GPUJOB_ENDPOINT": endpoint.url if endpoint else "",
        "GPUJOB_MODEL": context.model_name,
        "GPUJOB_MODEL_PATH": context.model_path,
        "GPUJOB_CONCURRENCIES": concurrency_text(benchmark),
        "GPUJOB_ISL": str(benchmark.isl or ""),
        "GPUJOB_OSL": str(benchmark.osl or ""),
        "GPUJOB_REQ_RATE": str(benchmark.req_rate),
        "GPUJOB_RESULT_DIR": f"{{run_dir}}/{folder}" if folder else "",
    }
    return {name: value for name, value in found.items() if value}
