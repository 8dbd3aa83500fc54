#!/bin/sh
# Starts the Wordle environment on HOST (this machine) and PORT (7860). It has no authentication: --insecure says so.
# `exec` replaces this shell, so SIGTERM reaches Python.
exec "${PYTHON:-python}" -u examples/wordle/environment.py --host "${HOST:-127.0.0.1}" --port "${PORT:-7860}" --insecure
