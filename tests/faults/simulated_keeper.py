"""Whoever replaces the key of a signed run in a simulation."""

from __future__ import annotations

from faults.simulated_keys import keys_in_force
from faults.simulated_parts import rekeyed
from faults.simulated_runtime import Process
from faults.simulated_world import World
from weightwire.errors import BadKey, BucketError, Fenced, NoRun, Untrusted

_PATIENCE = 3600.0  # seconds after which the trainers have failed to begin a run


class SimKeeper:
    name = "keeper"

    def __init__(self, world: World) -> None:
        self.world = world
        self.revokes = world.random.random() < 0.8  # otherwise both keys are in force

    async def live(self, process: Process) -> bool:
        """Adds the next key and revokes the old one. Returns whether that is done."""
        world = self.world
        assert world.keys is not None
        signer, new = world.signer(), world.keys.honest[1].public.hex
        assert signer is not None
        old = world.keys.first if self.revokes else frozenset[str]()
        try:
            fence = await rekeyed(world.store, process, signer, frozenset({new}), old)
        except (BadKey, BucketError, Fenced, NoRun, Untrusted) as problem:
            world.trace(f"{world.now()} {self.name}: {problem.message}")
            if isinstance(problem, NoRun) and world.loop.time() > _PATIENCE:
                return True
            return new in keys_in_force(world.store.objects)  # by an earlier attempt that seemed to fail
        if {*keys_in_force(world.store.objects, fence)} != ({new} | (world.keys.first - old)):
            world.violate(f"the keys after version {fence} are not those that were asked for")
        return True
