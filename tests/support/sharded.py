"""One rank of a real torch job, in a separate process: trains a small model with FSDP2 and publishes it.

Started by `Job`. Ranks write their results to files. torch also gathers the weights of every step, for comparison.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.warm_python import FreshPython, WarmPython

__all__ = ["Job"]


class Job:
    """Ranks that run one of the scenes below."""

    def __init__(
        self,
        room: Path,
        size: int,
        scene: str,
        url: str | os.PathLike[str],
        start: type[WarmPython] | type[FreshPython] = WarmPython,
        **options: Any,
    ) -> None:
        self.room = room
        room.mkdir(exist_ok=True)
        told = {"room": str(room), "size": size, "scene": scene, "url": str(url), **options}
        # As many threads as there are ranks are enough.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.processes = [
            start([__file__, json.dumps({**told, "rank": rank})], room / f"rank-{rank}.out", room, env)
            for rank in range(size)
        ]

    def wait(self, timeout: float = 240.0) -> list[int]:
        """The exit code of each rank."""
        until = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def said(self, rank: int) -> str:
        return (self.room / f"rank-{rank}.out").read_text(errors="replace")

    def found(self, rank: int) -> Any:
        return json.loads((self.room / f"found-{rank}.json").read_text())

    @staticmethod
    def truth(room: Path, step: int) -> Any:
        """All weights at a step, gathered by torch."""
        import torch

        weights = torch.load(room / f"step-{step}.pt")
        return weights | {"head.weight": weights["embed.weight"]}  # which are tied, as in the model


# --- in the process --------------------------------------------------------------------------------------------------


def main(told: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    rank, size = told["rank"], told["size"]
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{told['room']}/rendezvous")
    found = SCENES[told["scene"]](told)
    Path(told["room"], f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def make_model(told: dict[str, Any]) -> Any:
    """Rows that do not divide, fewer rows than ranks, replicated and plain parameters, buffers, tied weights."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 24)
            self.first = nn.Linear(24, 2)
            self.second = nn.Linear(2, 24)
            self.norm = nn.LayerNorm(24)
            self.head = nn.Linear(24, 11, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(24))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("cache", torch.zeros(5), persistent=False)

        def forward(self, tokens: Any) -> Any:
            hidden = self.embed(tokens) * self.scale
            return self.head(self.norm(hidden + self.second(self.first(hidden))))

    shape = told.get("mesh", [told["size"]])
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("copies", "rows")[-len(shape) :])
    model = Model()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    model.replicated = nn.Parameter(
        distribute_tensor(torch.ones(3, 5), mesh, [Replicate()] * mesh.ndim), requires_grad=False
    )
    fully_shard(model, mesh=mesh, ignored_params={model.scale, model.replicated})
    return model


def train(model: Any, optimizer: Any) -> None:
    """One step. Ranks see different tokens and must keep replicated parameters equal."""
    import torch
    import torch.distributed as dist

    model(torch.randint(0, 11, (4, 6))).square().mean().backward()
    dist.all_reduce(model.scale.grad)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.steps += 1
        model.replicated.to_local().fill_(float(model.steps))


def gather(model: Any, told: dict[str, Any]) -> None:
    """Writes all weights to a file, as whole tensors."""
    import torch

    whole = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in model.state_dict().items()
    }
    if told["rank"] == 0:
        torch.save(whole, Path(told["room"], f"step-{int(model.steps)}.pt"))


def publisher_of(told: dict[str, Any], **options: Any) -> Any:
    from weightwire import Publisher
    from weightwire.trainers.process_group import Ranks

    return Publisher(told["url"], ranks=Ranks(), threads=1, **options)


def scene_train(told: dict[str, Any]) -> Any:
    """Publishes every step, and waits for some."""
    import torch

    model = make_model(told)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(told["rank"])
    options = {name: told[name] for name in ("blocking", "anchor_every") if name in told}
    publications = []
    first = told.get("first", 0)
    for _ in range(first):
        train(model, optimizer)
    with publisher_of(told, **options) as publisher:
        for step in range(first, first + told["steps"]):
            gather(model, told)
            publications.append(publisher.publish(model, step=step))
            if step % 4 == 0:
                publications[-1].wait(60)
            train(model, optimizer)
    return {
        "versions": [one.wait(0) for one in publications],
        "superseded": [one.superseded_by is not None for one in publications],
        "state": publisher.state,
    }


def scene_attach(told: dict[str, Any]) -> Any:
    """The same through `attach`."""
    import torch

    from weightwire.trainers.process_group import Ranks
    from weightwire.trainers.torch import attach

    model = make_model(told)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attach(optimizer, model, told["url"], ranks=Ranks()):
        for _ in range(told["steps"]):
            model(torch.randint(0, 11, (4, 6))).square().mean().backward()
            torch.distributed.all_reduce(model.scale.grad)
            optimizer.step()
            optimizer.zero_grad()
    gather(model, told)
    return {}


def scene_die(told: dict[str, Any]) -> Any:
    """One rank is killed; the others keep publishing."""
    from weightwire.errors import RankFailed

    model = make_model(told)
    publisher = publisher_of(told)
    gather(model, told)
    publisher.publish(model, step=0).wait(60)
    if told["rank"] == told["dies"]:
        os._exit(7)
    began = time.monotonic()
    try:
        for step in range(1, 1000):
            model.steps += 1
            publisher.publish(model, step=step).wait(60)
    except RankFailed as problem:
        seconds = time.monotonic() - began
        publisher.close(60)
        Path(told["room"], f"found-{told['rank']}.json").write_text(
            json.dumps({"message": problem.message, "hint": problem.hint, "seconds": seconds})
        )
        os._exit(0)  # torch's own group is broken, too
    return None


def scene_fail(told: dict[str, Any]) -> Any:
    """A program that fails without closing its publisher."""
    model = make_model(told)
    publisher = publisher_of(told)
    publisher.publish(model, step=0).wait(60)
    raise SystemExit(3)


def scene_group(told: dict[str, Any]) -> Any:
    """A group without rank 0, in which each rank has a separate tensor."""
    import torch
    import torch.distributed as dist

    from weightwire import Publisher
    from weightwire.trainers.process_group import Ranks

    group = dist.new_group([1, 2])
    if told["rank"] == 0:
        return None
    ranks = Ranks(group)
    with Publisher(told["url"], ranks=ranks, threads=1) as publisher:
        for step in range(3):
            publisher.publish({f"of-{told['rank']}": torch.full((300,), step)}, step=step).wait(60)
    return {"rank": ranks.rank, "size": ranks.size}


def scene_refuse(told: dict[str, Any]) -> Any:
    """Columns are sharded."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from weightwire.errors import CheckpointError

    mesh = init_device_mesh("cpu", (told["size"],))
    columns = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    with publisher_of(told) as publisher:
        try:
            publisher.publish({"columns": columns})
        except CheckpointError as problem:
            return {"message": problem.message, "hint": problem.hint}
    return None


SCENES = {
    "train": scene_train,
    "attach": scene_attach,
    "die": scene_die,
    "fail": scene_fail,
    "group": scene_group,
    "refuse": scene_refuse,
}


def _main(arguments: Sequence[str]) -> None:
    main(json.loads(arguments[0]))


if __name__ == "__main__":
    _main(sys.argv[1:])
