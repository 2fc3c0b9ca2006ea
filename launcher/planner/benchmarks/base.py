"""What a benchmark answers about itself, and what benchmarks share. Pure."""

from dataclasses import dataclass

from launcher.jobfile.serving import BenchmarkSpec, concurrency_list
from launcher.planner.backends.base import BackendContext


@dataclass(frozen=True)
class Endpoint:
    """Where clients send requests: a node by its index, and a port before the job's offset."""

    node: int
    port: int

    @property
    def host(self) -> str:
        """The host as a placeholder."""
        return f"{{host_{self.node}}}"

    @property
    def port_word(self) -> str:
        """The port as a placeholder."""
        return f"{{port_{self.port}}}"

    @property
    def url(self) -> str:
        """Both."""
        return f"http://{self.host}:{self.port_word}"


class Benchmark:
    """How a benchmark is run."""

    name: str
    needs_endpoint = True  # whether it makes no sense without something to send requests to
    wrapping = 0  # words before those of its own program: a shell and its text, which start it

    def words(self, setting: BackendContext, benchmark: BenchmarkSpec, endpoint: Endpoint | None) -> list[str]:
        """Its command with placeholders."""
        raise NotImplementedError

    def result_dir(self, benchmark: BenchmarkSpec) -> str | None:
        """Folder of the run directory for its results."""
        return None


def concurrency_word(benchmark: BenchmarkSpec, between: str = "x") -> str:
    """The concurrencies as one word."""
    return between.join(map(str, concurrency_list(benchmark.concurrencies)))


def benchmark_environment(
    setting: BackendContext, kind: Benchmark, benchmark: BenchmarkSpec, endpoint: Endpoint | None
) -> dict[str, str]:
    """Variables that tell a benchmark what it is about; those that have no value are left out."""
    folder = kind.result_dir(benchmark)
    found = {
        "GPUJOB_ENDPOINT": endpoint.url if endpoint else "",
        "GPUJOB_MODEL": setting.model_name,
        "GPUJOB_MODEL_PATH": setting.model_path,
        "GPUJOB_CONCURRENCIES": concurrency_word(benchmark),
        "GPUJOB_ISL": str(benchmark.isl or ""),
        "GPUJOB_OSL": str(benchmark.osl or ""),
        "GPUJOB_REQ_RATE": str(benchmark.req_rate),
        "GPUJOB_RESULT_DIR": f"{{run_dir}}/{folder}" if folder else "",
    }
    return {name: value for name, value in found.items() if value}
