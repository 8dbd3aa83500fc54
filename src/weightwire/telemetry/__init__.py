"""Tell: the list of stages, one event per stage of a version, and both as Prometheus metrics."""

from weightwire.telemetry.events import Event, Listener, careful, log_event
from weightwire.telemetry.metrics import Metrics

__all__ = ["Event", "Listener", "Metrics", "careful", "log_event"]
