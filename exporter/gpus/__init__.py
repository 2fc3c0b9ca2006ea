"""GPUs of the job: records, readers and attribution."""
