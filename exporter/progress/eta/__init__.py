"""ETA of a worker and its job, with an interval, and warnings for slowdowns and stalls."""

from exporter.progress.eta.estimator import EstimatorWarnings, EtaEstimator
from exporter.progress.eta.interval import EtaEstimate, median_seconds_per_item, slowest_eta
from exporter.progress.eta.prior import RunPrior

__all__ = ["EstimatorWarnings", "EtaEstimate", "EtaEstimator", "RunPrior", "median_seconds_per_item", "slowest_eta"]
