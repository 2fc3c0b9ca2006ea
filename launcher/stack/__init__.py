"""A user's own Prometheus, Alertmanager and boards, without an administrator."""
