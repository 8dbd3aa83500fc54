"""Asynchronous GRPO in plain PyTorch, on one machine or many: the trainer.

    python examples/wordle/environment.py
    weightwire serve examples/wordle/policy --follow /tmp/run
    python examples/wordle/train.py --bucket /tmp/run --environment http://127.0.0.1:8100 --rollout http://127.0.0.1:8000

A thread plays games all the time (`play.py`), with whatever version the rollout servers serve at the moment. Each step
here takes a batch of games, drops those that are too stale, trains on the rest and publishes the new weights. Weights
travel through the bucket: the trainer never sends any to a server, and no step waits for one.

A restarted trainer continues from the newest version of its run. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

import weightwire
from play import Group, playing
from policy import save_policy

__all__ = ["Batch", "advantages_of", "batch_of", "loss_of", "main"]

_MAX_RATIO = 2.0  # upper bound of the importance weight of a token


def main() -> None:
    arguments = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        train(arguments, stop)
    except weightwire.WeightwireError as error:
        sys.exit(f"error: {error}")
    if stop.is_set():
        sys.exit("error: stopped before the last step")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train(arguments: argparse.Namespace, stop: threading.Event) -> None:
    if not (arguments.model / "config.json").is_file():
        raise weightwire.CheckpointError(
            f"{arguments.model}: not a checkpoint directory", hint="pass --model DIR with a config.json in DIR"
        )
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    policy, done = load_policy(arguments)
    # Adam moves every weight by about its learning rate. SGD moves those with large gradients, so it learns as much
    # while fewer bfloat16 weights change.
    optimizer = torch.optim.SGD(policy.parameters(), lr=arguments.lr, momentum=0.9)

    with weightwire.Publisher(arguments.bucket, files=arguments.model) as publisher:
        publisher.publish(policy, step=done).wait()
        with playing(
            arguments.environment,
            arguments.rollout,
            groups=arguments.groups,
            games=arguments.games,
            seed=arguments.seed + done,  # a restart plays other games
            say=say,
        ) as games:
            for step in range(done + 1, arguments.steps + 1):
                groups, staleness = fresh(games, arguments, publisher, stop)
                if stop.is_set():
                    break
                loss = loss_of(policy, batch_of(groups))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                metrics = {**figures(groups), "staleness": staleness, "loss": loss.item()}
                publisher.publish(policy, step=step, metrics=metrics)
                print(f"step {step}", *(f"{name} {value:.3f}" for name, value in metrics.items()), sep="  ", flush=True)
    if arguments.save is not None:
        save_policy(policy, arguments.save)


def load_policy(arguments: argparse.Namespace) -> tuple[Any, int]:
    """The policy in float32, and how many steps it was trained: the newest version of the run, or --model.

    The run holds the published bfloat16 weights only. A real trainer also saves its float32 masters and its optimizer
    state, and resumes from those.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        weightwire.Follower(arguments.bucket, into=Path(folder) / "newest", name="trainer") as follower,
    ):
        try:
            version = follower.once()
        except weightwire.NoRun:
            return _load(arguments.model), 0
        newest = follower.take()
        step = (newest.step if newest else None) or 0
        say(f"continuing from version {version} (step {step})")
        return _load(follower.checkpoint()), step


def _load(directory: Path) -> Any:
    # The masters are float32. They are published as bfloat16, which the rollout servers serve.
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@dataclass(frozen=True)
class Batch:
    """Games side by side, padded on the right. `written` marks the tokens of the policy: it learns from those only."""

    tokens: torch.Tensor
    written: torch.Tensor
    logprobs: torch.Tensor  # at the time of writing
    advantages: torch.Tensor  # one per game


def batch_of(groups: Sequence[Group]) -> Batch:
    samples = [sample for group in groups for sample in group]
    return Batch(
        tokens=_padded([sample.tokens for sample in samples], torch.long),
        written=_padded([sample.written for sample in samples], torch.bool),
        logprobs=_padded([sample.logprobs for sample in samples], torch.float32),
        advantages=advantages_of(groups),
    )


def advantages_of(groups: Sequence[Group]) -> torch.Tensor:
    """How much better a game went than the others with the same answer, in standard deviations over all games."""
    rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
    better = rewards - rewards.mean(dim=1, keepdim=True)
    return (better / (better.std() + 1e-3)).flatten()


def loss_of(policy: Any, batch: Batch) -> torch.Tensor:
    """The policy gradient, off-policy: older versions played these games.

    Each token is weighted by how much likelier it is now than when it was written, up to a bound.
    """
    rows, places = batch.written.nonzero(as_tuple=True)
    hidden = policy.model(batch.tokens).last_hidden_state
    # The logits of a token are at the position before it.
    logprobs = policy.lm_head(hidden[rows, places - 1]).log_softmax(-1)
    logprobs = logprobs.gather(1, batch.tokens[rows, places, None]).squeeze(1)
    ratio = (logprobs.detach() - batch.logprobs[rows, places]).exp().clamp(max=_MAX_RATIO)
    return -(ratio * batch.advantages[rows] * logprobs).mean()


def fresh(
    games: Callable[[], Group | None],
    arguments: argparse.Namespace,
    publisher: weightwire.Publisher,
    stop: threading.Event,
) -> tuple[list[Group], float]:
    """The groups of one step, and how many versions old they are on average."""
    groups: list[Group] = []
    stale: list[float] = []
    while len(groups) < arguments.groups and not stop.is_set():
        group = games()
        if group is None:
            continue
        newest = publisher.version or 0
        ages = [newest - min(sample.versions) for sample in group]
        if max(ages) <= arguments.max_staleness:
            groups.append(group)
            stale += ages
    return groups, fmean(stale) if stale else 0.0


def figures(groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group]
    return {
        "reward": fmean(sample.reward for sample in samples),
        "solved": fmean(sample.solved for sample in samples),
    }


def _padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Teach the policy Wordle by asynchronous GRPO and publish its weights after every step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    here = Path(__file__).parent
    parser.add_argument("--bucket", required=True, metavar="URL", help="where to publish: a directory, s3://...")
    parser.add_argument("--environment", default="http://127.0.0.1:8100", metavar="URL", help="the Wordle server")
    parser.add_argument(
        "--rollout", action="append", required=True, metavar="URL", help="a rollout server; may be repeated"
    )
    parser.add_argument(
        "--model", type=Path, default=here / "policy", metavar="DIR", help="the checkpoint to start a new run from"
    )
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--groups", type=int, default=8, help="answers per step")
    parser.add_argument("--games", type=int, default=16, help="games per answer")
    parser.add_argument("--lr", type=float, default=6e-3, help="learning rate of SGD with momentum")
    parser.add_argument("--max-staleness", type=int, default=4, metavar="N", help="maximum age of a game in versions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the final checkpoint there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
