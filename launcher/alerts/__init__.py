"""Alerts for people: the configuration of Alertmanager, what fires, and silences."""
