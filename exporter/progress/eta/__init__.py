"""Seconds left of a worker and of its job, with an interval, and whether it has slowed down or stalled."""

from exporter.progress.eta.estimator import Alarms, Estimator
from exporter.progress.eta.interval import Estimate, peer_pace, slowest
from exporter.progress.eta.prior import Prior

__all__ = ["Alarms", "Estimate", "Estimator", "Prior", "peer_pace", "slowest"]
