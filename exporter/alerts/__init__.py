"""Receiver of alerts: their log on this machine, and a word when the heartbeat of the alerting stops."""
