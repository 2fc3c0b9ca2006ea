"""How many series a page has: families by detail, and those whose series begin late.

Names are without the prefix. A family that is not named here is on pages of normal detail, and begins at once.
"""

# What alert rules read, and the attempt to which they belong
ESSENTIAL_FAMILIES = frozenset(
    (
        *("info", "phase", "start_timestamp_seconds", "time_limit_seconds", "time_limit_timestamp_seconds"),
        *("workers_expected", "gpus_allocated", "stall_timeout_seconds", "launch_timeout_seconds", "launch_check"),
        *("launch_verified", "ready", "ready_workers", "ready_workers_expected", "ready_timeout_seconds"),
        *("worker_up", "worker_state", "worker_last_exit_code", "worker_last_exit_signal"),
        *("worker_last_exit_timestamp_seconds", "worker_last_exit_restarts_left", "worker_items"),
        *("worker_items_expected",),
        *("worker_progress_last_timestamp_seconds", "worker_progress_unmatched", "log_lag_bytes"),
        *("worker_slowdown_ratio", "worker_lag_ratio", "eta_seconds", "finish_timestamp_seconds"),
        *("time_limit_met_probability_ratio", "cgroup_memory_limit_bytes", "cgroup_memory_working_set_bytes"),
        *("filesystem_avail_bytes", "filesystem_size_bytes", "filesystem_responding"),
        *("filesystem_full_timestamp_seconds", "output_files_invalid", "output_stalled", "worker_output_stalled"),
        *("worker_output_mtime_timestamp_seconds", "checkpoint_last_timestamp_seconds"),
        *("checkpoint_interval_seconds", "checkpoint_valid", "checkpoint_writing", "checkpoint_shards_missing"),
        *("checkpoint_stopped_seconds", "checkpoints_total"),
        *("gpu_driver_state", "gpus_visible", "gpu_health", "gpu_state", "gpu_recovery_action"),
        *("gpu_row_remap_failure", "gpu_ecc_job_errors_total", "gpu_throttle_seconds_total"),
        *("gpu_xid_last_timestamp_seconds", "gpu_foreign_processes", "worker_gpu_info", "worker_gpu_misplaced"),
        *("worker_gpu_condition", "worker_gpu_memory_full_timestamp_seconds", "log_errors_total"),
        *("collector_success", "collector_last_success_timestamp_seconds", "alert_threshold"),
    )
)
# What neither alert rules nor panels read for each worker, GPU or file system, and the duration of reads
FULL_FAMILIES = frozenset(
    (
        *("worker_start_timestamp_seconds", "worker_memory_pss_bytes", "worker_children", "worker_threads"),
        *("worker_open_files", "worker_context_switches_total", "worker_eta_seconds", "worker_progress_info"),
        *("log_bytes_total", "log_lines_total", "filesystem_inodes", "filesystem_inodes_avail"),
        *("gpu_memory_utilization_ratio", "gpu_power_limit_watts", "gpu_clock_hertz", "gpu_pcie_link_width_ratio"),
        *("gpu_pcie_link_generation_ratio", "gpu_fan_ratio", "gpu_workers", "worker_gpu_memory_bytes"),
        *("worker_gpu_sm_utilization_ratio", "worker_finish_timestamp_seconds", "worker_output_bytes"),
        *("worker_output_records", "collector_duration_seconds"),
    )
)
# Usually always 0. Below full detail, such a series begins with its first other value, and then stays
LATE_FAMILIES = frozenset(
    (
        *("phase", "worker_state", "worker_restarts_total", "worker_exits_total", "worker_stalled"),
        *("worker_progress_unmatched", "worker_lag_ratio", "log_errors_total", "log_lag_bytes"),
        *("log_pattern_timeouts_total", "output_stalled", "worker_output_stalled", "filesystem_low"),
        "checkpoint_stopped_seconds",
        *("gpu_xid_errors_total", "gpu_throttle_seconds_total", "gpu_ecc_errors_total", "gpu_ecc_job_errors_total"),
        *("gpu_remapped_rows_total", "gpu_row_remap_pending", "gpu_row_remap_failure", "gpu_retired_pages_total"),
        *("gpu_pages_pending", "gpu_foreign_processes", "worker_gpu_misplaced", "worker_gpu_condition"),
    )
)
# What the timeline of a node stores: series of normal detail that the boards of jobs and nodes draw
TIMELINE_FAMILIES = frozenset(
    (
        *("cgroup_memory_limit_bytes", "cgroup_memory_peak_bytes", "cgroup_memory_pressure_seconds_total"),
        *("cgroup_memory_used_bytes", "cgroup_memory_working_set_bytes", "cgroup_oom_kills_total"),
        *("checkpoint_last_timestamp_seconds", "checkpoints_total", "collector_last_success_timestamp_seconds"),
        *("collector_success", "eta_seconds", "exporter_cpu_seconds_total", "exporter_memory_rss_bytes"),
        *("filesystem_avail_bytes", "filesystem_responding", "filesystem_size_bytes", "gpu_dram_activity_ratio"),
        *("gpu_ecc_job_errors_total", "gpu_energy_joules_total", "gpu_foreign_processes", "gpu_health", "gpu_info"),
        *("gpu_memory_total_bytes", "gpu_memory_used_bytes", "gpu_nvlink_bytes_per_second"),
        *("gpu_nvlink_bytes_total", "gpu_nvlink_errors_total", "gpu_pages_pending", "gpu_pcie_bytes_per_second"),
        *("gpu_pcie_replays_total", "gpu_power_watts", "gpu_remapped_rows_total", "gpu_retired_pages_total"),
        *("gpu_row_remap_pending", "gpu_sm_activity_ratio", "gpu_temperature_celsius", "gpu_tensor_activity_ratio"),
        *("gpu_throttle_seconds_total", "gpu_up", "gpu_utilization_ratio", "gpu_xid_errors_total"),
        *("gpu_xid_last_timestamp_seconds", "gpus_allocated", "gpus_visible", "info", "log_errors_total"),
        *("output_bytes", "output_file_mtime_timestamp_seconds", "output_files", "output_files_invalid"),
        *("output_growth_bytes_per_second", "output_records", "phase", "ready_workers", "ready_workers_expected"),
        *("start_timestamp_seconds", "time_limit_met_probability_ratio", "time_limit_seconds"),
        *("worker_cpu_seconds_total", "worker_exits_total", "worker_gpu_condition", "worker_io_read_bytes_total"),
        *("worker_io_write_bytes_total", "worker_items", "worker_items_expected", "worker_items_processed_total"),
        *("worker_lag_ratio", "worker_last_exit_code", "worker_last_exit_signal"),
        *("worker_last_exit_timestamp_seconds", "worker_log_value", "worker_memory_rss_bytes"),
        *("worker_progress_last_timestamp_seconds", "worker_restarts_total", "worker_slowdown_ratio"),
        *("worker_stalled", "worker_state", "worker_throughput_items_per_second", "worker_up", "workers_expected"),
    )
)
