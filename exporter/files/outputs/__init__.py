"""Output files: growth, records, and stalls."""
