"""The board page, which needs no Grafana."""
