"""Builds the Grafana dashboards of this project; `python -m grafana.build` writes them.

Needed by developers only: users import the JSON files in `grafana/dashboards/`.
"""
