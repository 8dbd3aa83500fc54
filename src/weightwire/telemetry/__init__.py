"""Tell: the list of stages, an event for each stage of a version, progress, and Prometheus metrics."""

from weightwire.telemetry.engine_metrics import EngineMetrics
from weightwire.telemetry.events import Event, Listener, careful, each_listener, log_event, warning
from weightwire.telemetry.metrics import Metrics
from weightwire.telemetry.progress import ProgressCallback, StartProgress, ignore_progress, start_progress
from weightwire.telemetry.stages import STAGES, Side, Stage, stage_names

__all__ = [
    "STAGES",
    "EngineMetrics",
    "Event",
    "Listener",
    "Metrics",
    "ProgressCallback",
    "Side",
    "Stage",
    "StartProgress",
    "careful",
    "each_listener",
    "ignore_progress",
    "log_event",
    "stage_names",
    "start_progress",
    "warning",
]
