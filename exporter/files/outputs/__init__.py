"""Result files: growth, records, and stalls."""
