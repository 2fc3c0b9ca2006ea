"""The launcher of GPU jobs: job file, topology, plan, sbatch text, orchestration and the worker wrapper."""
