"""Seconds left of a worker and of its job, with an interval, and whether it has slowed down or stalled."""

from exporter.progress.eta.estimator import EstimatorWarnings, EtaEstimator
from exporter.progress.eta.interval import EtaEstimate, median_peer_pace, slowest_eta
from exporter.progress.eta.prior import RunPrior

__all__ = ["EstimatorWarnings", "EtaEstimate", "EtaEstimator", "RunPrior", "median_peer_pace", "slowest_eta"]
