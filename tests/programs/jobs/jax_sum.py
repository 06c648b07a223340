"""JAX: `initialize` finds the other processes. A process that fails waits for them for 5 s."""

import jax
import jax.numpy as jnp
import planted
from jax.experimental import multihost_utils

jax.distributed.initialize(shutdown_timeout_seconds=5)
for step in range(4):
    planted.check(step)
    ranks = multihost_utils.process_allgather(jnp.ones(1))
print(f"trained {step + 1} steps on {int(ranks.sum())} ranks", flush=True)
