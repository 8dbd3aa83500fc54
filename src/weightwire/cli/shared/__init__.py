"""Shared by commands: the terminal, options, JSON, progress, signals, and following a run."""
