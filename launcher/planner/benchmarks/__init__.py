"""What uses the workers of a serving job, one file for each kind. Pure."""

from launcher.planner.benchmarks.base import Benchmark
from launcher.planner.benchmarks.custom import Custom
from launcher.planner.benchmarks.manual import Manual
from launcher.planner.benchmarks.router import Router
from launcher.planner.benchmarks.sa_bench import SaBench

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (Manual(), Custom(), SaBench(), Router())
}
