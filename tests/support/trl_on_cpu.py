"""TRL's asynchronous GRPO on a CPU, with a tiny model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.doc_pages import blocks, filled

__all__ = ["grpo", "patch_trl"]


def reward_letters(completions: list[Any], **_: Any) -> list[float]:
    """Counts the letters of each completion. At module level, because another process calls it."""
    return [float(sum(letter.isalpha() for letter in completion[0]["content"])) for completion in completions]


def attend(
    query: Any, key: Any, value: Any, begin_q: Any, begin_k: Any, *_: Any, softmax_scale: float, **__: Any
) -> Any:
    """Computes packed attention on the CPU: FlashAttention needs a GPU."""
    parts = []
    for first, last, begin, end in zip(begin_q[:-1], begin_q[1:], begin_k[:-1], begin_k[1:], strict=True):
        q, k, v = (one.transpose(0, 1)[None] for one in (query[first:last], key[begin:end], value[begin:end]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        attention = torch.nn.functional.scaled_dot_product_attention
        parts.append(attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def patch_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches the three places in which TRL requires a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))


def grpo(model: Path, server: str, bucket: str, output: Path, steps: int = 5) -> Any:
    """A trainer, made as in docs/trainers.md."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    prompts = [[{"role": "user", "content": text}] for text in ("wire", "weight", "bucket", "delta")]
    args = AsyncGRPOConfig(
        output_dir=str(output),
        vllm_server_base_url=server,
        max_steps=steps,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=8,
        token_budget=-1,
        # More would take CPU from training and delay the end of the worker.
        max_inflight_tasks=4,
        queue_maxsize=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dtype="float32",
    )
    given = {
        "model": str(model),
        "reward": reward_letters,
        "args": args,
        "dataset": Dataset.from_dict({"prompt": prompts}),
        "tokenizer": tokenizer,
    }
    [block] = blocks("docs/trainers.md", "TRL, asynchronous GRPO", "python")
    make, train = filled(block, bucket=bucket, model=model, server=server).rsplit("\n", 2)[:2]
    assert train == "trainer.train()"
    exec(make, given)
    return given["trainer"]
