"""Slurm's accounting as text, for ``report.md`` and for a terminal."""

from exporter.contract.slurm_accounting import SlurmAccounting
from exporter.gpus.analysis.node_status import energy_text
from launcher.words import count_text, duration_text

NOT_MEASURED = "not measured"
SECONDS_PER_HOUR = 3600.0
MIB = 1024**2


def accounting_lines(found: SlurmAccounting) -> list[str]:
    """One line for each figure, or for the reason why there are none."""
    if found.problem is not None:
        return [f"{NOT_MEASURED}: {found.problem}"]
    lines = [
        f"state: {found.state}, ExitCode {found.exit_code or '-'}, DerivedExitCode {found.derived_exit_code or '-'}",
        f"allocated: {found.allocated or NOT_MEASURED}",
        f"time: {duration_text(found.elapsed_s)} of {_limit_text(found.limit_s)}{_attempts_text(found.attempts)}",
        f"CPU: {_cpu_text(found)}",
        f"memory: {_memory_text(found)}",
        f"MaxRSS: {NOT_MEASURED if found.max_rss_bytes is None else f'{_size(found.max_rss_bytes)}, the largest task'}",
    ]
    if found.gpu_time:
        lines.append(f"GPU hours: {_gpu_hours_text(found)}{' over all attempts' if found.attempts != 1 else ''}")
    if found.gpu_idle_ratio is not None:
        seen = f" (seen {found.gpu_seen_ratio:.0%})".replace("%", " %") if found.gpu_seen_ratio is not None else ""
        lines.append(f"GPUs idle: {100 * found.gpu_idle_ratio:.0f} % of the time in which a sidecar looked{seen}")
    if found.gpu_energy_j is not None:
        lines.append(f"energy (gpu): {energy_text(found.gpu_energy_j)}, by the counters of the boards")
    if found.slurm_energy_j is not None:
        lines.append(f"energy (slurm): {energy_text(found.slurm_energy_j)} of the whole nodes, by Slurm")
    if not found.complete:
        lines.append("not complete: accounting does not know the ends of all steps")
    return lines


def accounting_summary(found: SlurmAccounting) -> str:
    """The figures in one line."""
    if found.problem is not None:
        return f"{NOT_MEASURED}: {found.problem}"
    hours = [f"{_gpu_hours_text(found)} GPU hours"] if found.gpu_time else []
    return ", ".join([f"CPU {_cpu_text(found)}", f"memory {_memory_text(found)}", *hours])


def _limit_text(limit_s: float | None) -> str:
    return "no limit" if limit_s is None else duration_text(limit_s)


def _attempts_text(attempts: int | None) -> str:
    return f", the last of {count_text(attempts, 'attempt')}" if attempts is not None and attempts > 1 else ""


def _cpu_text(found: SlurmAccounting) -> str:
    """``31.25 % of 4 CPUs``."""
    if found.cpu_ratio is None:
        return NOT_MEASURED
    used = f", {found.cpu_s:.3f} s" if found.cpu_s is not None else ""
    least = "at least " if found.lower_bound else ""
    return f"{least}{found.cpu_ratio:.2%}".replace("%", " %") + f" of {count_text(found.cpus or 0, 'CPU')}{used}"


def _memory_text(found: SlurmAccounting) -> str:
    """``122.13 MiB of 600.00 MiB, 20.35 %``."""
    if found.memory_bytes is None:
        return NOT_MEASURED
    text = _size(found.memory_bytes)
    if found.memory_requested_bytes:
        share = f"{found.memory_bytes / found.memory_requested_bytes:.2%}".replace("%", " %")
        text += f" of {_size(found.memory_requested_bytes)}, {share}"
    return text


def _gpu_hours_text(found: SlurmAccounting) -> str:
    """``12.31 h100``, or the number alone if Slurm does not tell the type."""
    return ", ".join(
        f"{time.gpu_seconds / SECONDS_PER_HOUR:.3f}{f' {time.gpu_type}' if time.gpu_type else ''}"
        for time in found.gpu_time or ()
    )


def _size(count: float) -> str:
    return f"{count / MIB:.2f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:.2f} GiB"
