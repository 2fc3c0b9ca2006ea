"""GPUs of the job: records, inventory, and who uses which device."""
