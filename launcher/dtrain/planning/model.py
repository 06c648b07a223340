"""The model of a request: its shape, given in one of four ways, and its adapters."""

from __future__ import annotations

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.model.adapters import BaseBits, Lora
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.model.sizes import parse_count, shape_for_size, shape_from_sizes
from dtrain.planning.files import parsed
from dtrain.planning.request import PlanRequest
from dtrain.runtime.layout import Training


def shape_of(request: PlanRequest, training: Training) -> tuple[Shape, str]:
    """Return the model's shape, given in exactly one of four ways, and a note if its kind of layers
    is assumed, else ''. ``training``: that of the cluster file."""
    sizes = {name: value for name, value in request.sizes.items() if value is not None}
    ways = {
        "`model_size`": request.model_size,
        "`model`": request.model,
        "`model_config`": request.model_config,
        " ".join(f"`{name}`" for name in sizes): sizes or None,
    }
    given = [way for way, value in ways.items() if value is not None]
    if not given:
        raise UsageError(
            "no model to plan for",
            hint=(
                "set `model_size='100B'`, `model='llama-3-70b'`, `model_config='config.json'`, or "
                "`layers` and `hidden`"
            ),
        )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each describe a model", hint="keep one of them")
    if request.seq_len is not None and request.seq_len < 1:
        raise UsageError(f"`seq_len={request.seq_len}` is not a length", hint="such as 4096")
    if request.vocab is not None and request.vocab < 1:
        raise UsageError(f"`vocab={request.vocab}` is not a vocabulary", hint="such as 128256")
    seq_len = request.seq_len or training.seq_len
    if request.model_size is not None:
        size = parse_count(request.model_size)
        return shape_for_size(size, seq_len=seq_len, vocab=request.vocab), ""
    if sizes:
        missing = [f"`{name}`" for name in ("layers", "hidden") if name not in sizes]
        if missing:
            raise UsageError(
                f"{given[0]} requires {' and '.join(missing)}",
                hint="sizes of a model include at least `layers` and `hidden`",
            )
        return shape_from_sizes(**sizes, vocab=request.vocab, seq_len=seq_len), ""
    note = ""
    if request.model_config is not None:
        from dtrain.parallelism.model.huggingface import assumption, shape_from_config

        hint = "download config.json from the model's page on Hugging Face"
        shape = parsed(request.model_config, shape_from_config, hint)
        note = parsed(request.model_config, assumption, hint)
    else:
        from dtrain.parallelism.model.models import model

        shape = model(request.model or "")
    return shape.with_lengths(seq_len or shape.seq_len, request.vocab or shape.vocab), note


def lora_of(request: PlanRequest, shape: Shape, precision: Precision) -> Lora | None:
    """Return the adapters to train; None to train the whole model."""
    rank, targets = request.lora_rank, request.lora_targets or "all"
    if rank is None:
        for name in ("lora_targets", "base_bits"):
            value = getattr(request, name)
            if value is not None:
                raise UsageError(
                    f"`{name}={value!r}` is for the training of adapters",
                    hint="add `lora_rank`, such as 16",
                )
        return None
    if shape.every_part or shape.pattern:
        raise UsageError(
            f"`lora_rank={rank}`: dtrain plans adapters only for stacks of attention and MLPs",
            hint="leave it out, or choose another model",
        )
    if not 1 <= rank <= shape.hidden:
        raise UsageError(
            f"`lora_rank={rank}` is not a rank", hint=f"at least 1, at most {shape.hidden}"
        )
    if targets not in ("all", "attention"):
        raise UsageError(f"`lora_targets={targets!r}` is not known", hint="one of all, attention")
    return Lora(rank, "all" if targets == "all" else "attention", _base_bits(request, precision))


def _base_bits(request: PlanRequest, precision: str) -> BaseBits:
    """Return the bits of frozen matrices.

    Raises:
        UsageError: the number is not known, or does not go with the precision.
    """
    wanted = 16 if request.base_bits is None else request.base_bits
    known: tuple[BaseBits, ...] = (16, 8, 4)
    bits = next((one for one in known if one == wanted), None)
    if bits is None:
        hint = "16, 8 for fp8, or 4 for QLoRA"
        raise UsageError(f"`base_bits={wanted}` is not known", hint=hint)
    if bits == 8 and precision != "fp8":
        raise UsageError(
            f"`base_bits=8` needs fp8, not {precision}",
            hint="add `precision` fp8, or use `base_bits` 4 or 16",
        )
    return bits
