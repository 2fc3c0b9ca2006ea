"""What uses the workers of a serving job, one file for each kind. Pure."""

from launcher.benchmarks.base import Benchmark
from launcher.benchmarks.custom import Custom
from launcher.benchmarks.manual import Manual
from launcher.benchmarks.router import Router
from launcher.benchmarks.sa_bench import SaBench

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (Manual(), Custom(), SaBench(), Router())
}
