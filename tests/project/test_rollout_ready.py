"""The rollout server of `deploy/` lets no request through before the first version, nor while it is not ready.

Its vLLM is a fake, which starts at once. tests/project/test_deploy.py uses the real one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from project.test_deploy import ROLLOUT, Started, children, started
from support.checkpoint_trainer import CheckpointTrainer
from support.commands import Training

TESTS = Path(__file__).parents[1]
FAKE = """
import sys
from support.fake_vllm_process import serve
serve(int(sys.argv[sys.argv.index("--port") + 1]))
"""


@pytest.mark.slow
def test_requests_wait_for_the_first_version_and_for_a_server_that_hangs(tmp_path: Path) -> None:
    module = tmp_path / "fake/vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(FAKE)
    for package in list(module.parents)[:3]:
        (package / "__init__.py").touch()
    model = Training(tmp_path / "base").save("model")
    trainer = CheckpointTrainer(tmp_path)
    path = os.pathsep.join([str(tmp_path / "fake"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=trainer.bucket, MODEL=model, PYTHONPATH=path) as server:
        try:
            server.wait_for("waiting for a run at")
            assert statuses(server) == [503, 503, 503, 200, 200]
            assert "serving on" not in server.output()
            trainer.publish()
            server.wait_for("serving on http://127.0.0.1")
            server.until(lambda: statuses(server) == [200, 200, 200, 200, 200])
            [vllm] = [pid for args, pid in children(server.process.pid).items() if "vllm." in args]
            os.kill(vllm, signal.SIGSTOP)
            server.until(lambda: server.status("GET /readyz") == 503)
            server.wait_for("not ready: clients get 503")
            assert server.status("GET /v1/models") == 503
            assert server.status("GET /healthz") == 200
            os.kill(vllm, signal.SIGCONT)
            server.wait_for("ready again")
            server.until(lambda: server.status("GET /v1/models") == 200)
            assert server.end(signal.SIGTERM) == 0
        finally:
            trainer.close()


def statuses(server: Started) -> list[int]:
    return [server.status(f"GET {path}") for path in ("/v1/models", "/health", "/readyz", "/healthz", "/weight_info")]
