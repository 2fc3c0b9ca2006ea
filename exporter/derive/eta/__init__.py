"""Seconds left of a worker and of its job, with an interval, and whether it has slowed down or stalled."""

from exporter.derive.eta.estimator import Alarms, Estimator
from exporter.derive.eta.interval import Estimate
from exporter.derive.eta.job import peer_pace, slowest
from exporter.derive.eta.prior import Prior

__all__ = ["Alarms", "Estimate", "Estimator", "Prior", "peer_pace", "slowest"]
