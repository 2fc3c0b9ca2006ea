"""All contact with the machine: ``/proc``, files, logs, records. Frozen records in base units come back."""
