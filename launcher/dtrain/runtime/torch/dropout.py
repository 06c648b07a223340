"""The random numbers of training, such as dropout masks: which ranks draw the same ones, and when.

Ranks with different samples, tokens or layers draw different numbers. Tensor ranks hold the same
residual stream, of which they must drop the same features. What only one of them holds (its heads,
its features of an MLP, its share of the sequence) it drops with numbers of its own, as in
Megatron-LM (arXiv 1909.08053, appendix B.2).

The seeds of each step depend on its number, so a resumed run draws what an undisturbed one does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.runtime.torch.heads import with_random_weights
from dtrain.runtime.torch.weights import Materializer, forked, seed_of

_SEQUENCE = 8


@dataclass(slots=True)
class Draws:
    """What this rank draws outside of split layers. Tensor ranks draw the same."""

    seed: int
    mesh: DeviceMesh
    device: torch.device
    step: int = field(default=0, init=False)
    """The number of the current step of the run, from 0."""

    def begin(self, step: int) -> None:
        """Seed the generators for what the script draws before the passes of ``step``."""
        self.step = step
        self._reseed("script")

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Seed them for the passes of the step; after these, the next step begins."""
        self._reseed("passes")
        yield
        self.begin(self.step + 1)

    def _reseed(self, what: str) -> None:
        ranks = [self.mesh[name].get_local_rank() for name in ("pipeline", "replicate", "shard")]
        seed = seed_of(str(self.seed), f"{what}/{ranks}/{self.step}")
        # torch.manual_seed takes longer: it looks at devices of all kinds.
        torch.default_generator.manual_seed(seed)
        own = _generator(self.device)
        own.manual_seed(seed)
        # DataParallel draws on all GPUs of the process.
        for number, other in enumerate(torch.cuda.default_generators):
            if other is not own:
                other.manual_seed(seed_of(str(seed), str(number)))


@dataclass(slots=True)
class OwnDraws:
    """What tensor rank ``rank`` draws for itself, between `enter` and `leave`.

    Its seed is drawn from the CPU's generator, which the recomputation of a block restores, and
    the numbers outside are those that follow the seed, with and without these draws.
    """

    rank: int
    device: torch.device
    _outside: torch.Tensor | None = field(default=None, init=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, *_: object) -> None:
        """Does nothing inside. A hook of modules, too."""
        if self._outside is None:
            drawn = int(torch.randint(1 << 62, (), device="cpu"))
            generator = _generator(self.device)
            self._outside = generator.get_state()
            generator.manual_seed(seed_of(str(drawn), str(self.rank)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, *_: object) -> None:
        """Does nothing outside. A hook of modules, too."""
        if self._outside is not None:
            _generator(self.device).set_state(self._outside)
            self._outside = None

    def around(self, module: nn.Module) -> None:
        """Have all of the module's forward pass inside."""
        self._wrap(module, self.enter)

    def within(self, module: nn.Module) -> None:
        """Have the module's forward pass end outside, however it ends."""
        self._wrap(module, lambda: None)

    def _wrap(self, module: nn.Module, begin: Callable[[], None]) -> None:
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return forward(*args, **kwargs)
            finally:
                self.leave()

        module.forward = wrapped


def draws(name: str, block: nn.Module, width: int, materialize: Materializer) -> bool:
    """Whether the training pass of ``block`` draws random numbers. ``width``: of its input."""
    trial = with_random_weights(name, block, materialize).train()
    generator = _generator(materialize.device)
    with forked(materialize.device), torch.no_grad():
        before = generator.get_state()
        trial(torch.zeros(1, _SEQUENCE, width, device=materialize.device))
        return not torch.equal(before, generator.get_state())


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[number]
    return torch.default_generator
