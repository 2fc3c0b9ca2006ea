"""Interface of a benchmark, and helpers that benchmarks share. Pure."""

from dataclasses import dataclass

from launcher.jobfile.serving import BenchmarkSpec, concurrency_list
from launcher.planner.backends.base import BackendContext


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
    """How to run one kind of benchmark."""

    name: str
    needs_endpoint = True  # it needs a server to send requests to
    shell_prefix_length = 0  # words before its own program: the shell and the text that start it

    def argv(self, context: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        """Command with placeholders."""
        raise NotImplementedError

    def result_dir(self, benchmark: BenchmarkSpec) -> str | None:
        """Directory for its results, within the run directory."""
        return None


def concurrency_text(benchmark: BenchmarkSpec, separator: str = "x") -> str:
    """The concurrencies as one word."""
    return separator.join(map(str, concurrency_list(benchmark.concurrencies)))


def benchmark_environment(
    context: BackendContext, kind: Benchmark, benchmark: BenchmarkSpec, endpoint: Endpoint | None
) -> dict[str, str]:
    """Variables that describe the job to a benchmark; variables without a value are left out."""
    folder = kind.result_dir(benchmark)
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
