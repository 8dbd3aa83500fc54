#!/bin/sh
# The Wordle environment, on PORT (7860) of HOST (0.0.0.0). In the place of this shell, so that SIGTERM reaches it.
exec "${PYTHON:-python}" -u examples/wordle/environment.py --host "${HOST:-0.0.0.0}" --port "${PORT:-7860}"
