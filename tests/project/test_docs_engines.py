"""Runs the code of docs/engines.md, and README's vLLM commands."""

from __future__ import annotations

import json
import shlex
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.commands import Running, Training, bits_of
from support.doc_models import check_serve_command, one_step_later
from support.doc_pages import blocks, commands, filled, run_commands, run_python, run_shell, terminals
from support.stores import free_ports, running
from support.vllm_server import VLLM
from weightwire import Publisher


def test_vllm_example_serves_published_versions(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "vLLM")
    [on_cpu] = blocks("docs/engines.md", "vLLM on a CPU")
    spans, fresh = blocks("docs/engines.md", "Which version produced a sample", "python")
    serve, follow = block.strip().splitlines()
    for command in (serve, on_cpu):
        check_serve_command(command, vllm)
    bucket = tmp_path / "bucket"
    with Publisher(bucket, base=tiny) as publisher:
        words = shlex.split(filled(follow, bucket=bucket, server=vllm.url))
        words[words.index("replica")] = str(tmp_path / "replica")
        with Running(*words[1:], "--base", tiny) as running:
            version = publisher.publish(one_step_later(tiny)).wait()
            running.wait_for(f"version {version}")
            assert vllm.weight_version == str(version)
        choices: list[dict[str, Any]] = vllm.post(
            "/inference/v1/generate", {"token_ids": [9, 9], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        )["choices"]
        exec(spans, {})
        names: dict[str, Any] = {"choices": choices, "publisher": publisher}
        exec(fresh, names)
        assert names["fresh"] == choices


@pytest.mark.slow
def test_draft_example_updates_a_model_and_its_draft(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "Draft models")
    serve, *follow = commands(block)
    speculation = {"model": str(tiny), "num_speculative_tokens": 3}
    server = VLLM(tmp_path, tiny, options=["--speculative-config", json.dumps(speculation)])
    check_serve_command(serve, server)
    with running(server), ExitStack() as stack:
        followers, publishers = [], []
        for command, name in zip(follow, ("run", "draft"), strict=True):
            publishers.append(stack.enter_context(Publisher(tmp_path / name, base=tiny)))
            words = shlex.split(filled(command, server=server.url).replace(f"s3://bucket/{name}", str(tmp_path / name)))
            words[words.index("--into") + 1] = str(tmp_path / f"{name}-replica")
            followers.append(stack.enter_context(Running(*words[1:], "--base", tiny)))
        names = (server.url, f"{server.url},draft")
        for name, follower, publisher in zip(names, followers, publishers, strict=True):
            follower.wait_for("version 1: ")
            publisher.publish(one_step_later(tiny)).wait()
            assert f", {name} paused for " in follower.wait_for("version 2: ")
        assert server.weight_version == "2"


@pytest.mark.slow
def test_restore_example_gives_the_weights_of_a_run(tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "Start from the run's weights")
    checkpoint = Training(tmp_path).save("checkpoint-100")
    run_commands(f"weightwire publish checkpoint-100 run\n{filled(block, bucket='run')}", tmp_path)
    assert bits_of(tmp_path / "model") == bits_of(checkpoint)
    assert not (tmp_path / "model").is_symlink()


@pytest.mark.slow
def test_weightwire_serve_example_serves_the_published_version(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "weightwire serve")
    [port] = free_ports(1)
    with Publisher(tmp_path / "bucket") as publisher:
        version = publisher.publish(tiny).wait()
    serve, curl = filled(block, bucket=tmp_path / "bucket", model=tiny).strip().splitlines()
    with terminals(f"{serve} --port {port}", directory=tmp_path) as [serving]:
        serving.wait_for(f"version {version}")
        answer = json.loads(run_shell(curl.replace("curl", "curl -sS").replace("8000", str(port)), tmp_path))
    assert [span["version"] for span in answer["choices"][0]["weight_versions"]] == [str(version)]


@pytest.mark.slow
def test_torch_module_example_loads_the_published_weights(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/engines.md", "A torch module", "python")
    with Publisher(tmp_path / "bucket", base=tiny) as publisher:
        weights = one_step_later(tiny)
        version = publisher.publish(weights).wait()
    before = textwrap.dedent(f"""
        import time, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tiny)!r}, dtype=torch.float32)
        def until_served():
            while engine.version != {version}:
                time.sleep(0.01)
                yield "hello"
        requests = until_served()
        def answer(model, request, version):
            print(version)
    """)
    block = filled(block, bucket=tmp_path / "bucket").replace('into="', f'base="{tiny}", into="')
    run_python(before + block + '\nmodel.to(torch.bfloat16).save_pretrained("served")\n', tmp_path)
    expected = {name: bytes(bits) for name, (_, _, bits) in weights.items()}
    assert {name: one for name, one in bits_of(tmp_path / "served").items() if name in expected} == expected


@pytest.mark.slow
def test_example_for_other_engines_gets_a_patch(tiny: Path, tmp_path: Path) -> None:
    """The second version is published after the first was loaded, so it arrives as a patch."""
    [block] = blocks("docs/engines.md", "Anything else", "python")
    before = textwrap.dedent(f"""
        import itertools, safetensors.torch, torch, weightwire
        load_file = safetensors.torch.load_file
        publisher = weightwire.Publisher("bucket")
        publisher.publish({str(tiny)!r}).wait()
        def load_then_publish(path):
            weights = load_file(path)
            changed = {{name: tensor.clone() for name, tensor in weights.items()}}
            for tensor in changed.values():
                tensor.view(torch.int16).view(-1)[::101] ^= 1
            safetensors.torch.save_file(changed, "published.safetensors")
            publisher.publish(changed).wait()
            return weights
        safetensors.torch.load_file = load_then_publish
        watch = weightwire.Follower.watch
        weightwire.Follower.watch = lambda self, timeout: itertools.islice(watch(self, timeout), 2)
    """)
    block = filled(block, bucket="bucket")
    run_python(before + block + '\nsafetensors.torch.save_file(weights, "held.safetensors")\n', tmp_path)
    assert bits_of(tmp_path / "held.safetensors") == bits_of(tmp_path / "published.safetensors") != bits_of(tiny)
