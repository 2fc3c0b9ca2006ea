"""NVIDIA GPUs, read by NVML."""
