"""Receiver of alerts: logs them on this machine, and reports when the heartbeat of alerting stops."""
