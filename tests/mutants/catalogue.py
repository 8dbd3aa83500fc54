"""All mutants. Add one for every rule that a check in the source keeps."""

from __future__ import annotations

from mutants.catchup_mutants import CATCHUP_MUTANTS
from mutants.chain_mutants import CHAIN_MUTANTS
from mutants.delta_mutants import DELTA_MUTANTS
from mutants.engine_mutants import ENGINE_MUTANTS
from mutants.hostile_mutants import HOSTILE_MUTANTS
from mutants.mutant import Mutant
from mutants.publisher_mutants import PUBLISHER_MUTANTS
from mutants.replica_mutants import REPLICA_MUTANTS
from mutants.sglang_mutants import SGLANG_MUTANTS
from mutants.trust_mutants import TRUST_MUTANTS
from mutants.upkeep_mutants import UPKEEP_MUTANTS

# Mutants of the protocol and the replica, which the simulation alone should notice. It has no files of many tensors, no
# engines and no servers.
SIMULATED: dict[str, Mutant] = {
    one.name: one
    for one in (
        *CHAIN_MUTANTS,
        *TRUST_MUTANTS,
        *CATCHUP_MUTANTS,
        *REPLICA_MUTANTS,
        *PUBLISHER_MUTANTS,
        *UPKEEP_MUTANTS,
    )
}

MUTANTS: dict[str, Mutant] = SIMULATED | {
    one.name: one
    for one in (
        *DELTA_MUTANTS,
        *ENGINE_MUTANTS,
        *SGLANG_MUTANTS,
        *HOSTILE_MUTANTS,
    )
}
