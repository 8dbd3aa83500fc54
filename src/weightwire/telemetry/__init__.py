"""Tell: the list of stages, one event per stage of a version, and both as Prometheus metrics."""

from weightwire.telemetry.events import Event, Listener, careful, log_event, warning
from weightwire.telemetry.metrics import Metrics
from weightwire.telemetry.stages import STAGES, Side, Stage, stage_names

__all__ = ["STAGES", "Event", "Listener", "Metrics", "Side", "Stage", "careful", "log_event", "stage_names", "warning"]
