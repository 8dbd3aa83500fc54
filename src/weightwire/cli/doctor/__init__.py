"""`weightwire doctor`: checks whether publishing and following work here, and says what does not."""

from weightwire.cli.doctor.doctor_command import doctor

__all__ = ["doctor"]
