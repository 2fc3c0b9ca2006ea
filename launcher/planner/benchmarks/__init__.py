"""Benchmarks of a serving job, one module for each kind. Pure."""

from launcher.planner.benchmarks.base import Benchmark
from launcher.planner.benchmarks.custom import CustomBenchmark
from launcher.planner.benchmarks.manual import ManualBenchmark
from launcher.planner.benchmarks.router import RouterBenchmark
from launcher.planner.benchmarks.sa_bench import SaBenchmark

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (ManualBenchmark(), CustomBenchmark(), SaBenchmark(), RouterBenchmark())
}
