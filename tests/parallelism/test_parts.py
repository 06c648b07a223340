"""Parts of layers beside attention and MLPs: what real modules keep, and published FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.model.flop import attention_flop
from dtrain.parallelism.model.mixers import DeltaNet, KimiDelta, Mamba2, ShortConv
from dtrain.parallelism.model.models import model
from dtrain.parallelism.model.parts import CrossAttention
from dtrain.parallelism.model.sparse import CompressedAttention

HIDDEN, TOKENS = 64, 96


def kept_bytes(forward: Callable[[], Any], shared: list[Any]) -> int:
    """Return the bytes of the tensors that autograd saves, without the ``shared`` ones."""
    import torch

    found: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    for tensor in shared:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    result.float().sum().backward()
    return sum(found.values())


def scan(part: Mamba2, projected: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
    """Compute convolution, recurrence and gated norm of Mamba-2 step by step (arXiv 2405.21060,
    equation 1 and figure 6). Returns the scan's output and its norm, (tokens, d) each."""
    import torch
    from torch.nn import functional

    d, groups, state, heads = part.inner, part.groups, part.state, part.heads
    gate, convolved, steps = projected.split([d, d + 2 * groups * state, heads], dim=-1)
    padded = functional.pad(convolved.T, (part.conv - 1, 0))[None]
    mixed = functional.silu(
        functional.conv1d(padded, weights["conv"], groups=weights["conv"].shape[0])
    )
    values, keys, queries = mixed[0].T.split([d, groups * state, groups * state], dim=-1)
    values = values.view(-1, heads, part.head_size)
    keys = keys.view(-1, groups, state).repeat_interleave(heads // groups, 1)
    queries = queries.view(-1, groups, state).repeat_interleave(heads // groups, 1)
    delta = functional.softplus(steps + weights["bias"])
    memory = torch.zeros(heads, part.head_size, state, dtype=projected.dtype)
    outputs = []
    for now in range(len(projected)):
        decay = torch.exp(-delta[now] * weights["rate"].exp())
        added = delta[now][:, None, None] * values[now][:, :, None] * keys[now][:, None, :]
        memory = decay[:, None, None] * memory + added
        skipped = weights["skip"][:, None] * values[now]
        outputs.append((memory * queries[now][:, None, :]).sum(-1) + skipped)
    output = torch.stack(outputs).reshape(-1, d)
    return output, functional.layer_norm(output * functional.silu(gate), (d,))


@pytest.mark.torch
@pytest.mark.parametrize("groups", [1, 2])
def test_a_real_state_space_layer_keeps_what_the_part_says(groups: int) -> None:
    import torch
    from torch.nn import functional

    part = Mamba2(heads=4, head_size=32, state=16, groups=groups)
    torch.manual_seed(0)

    class Fused(torch.autograd.Function):
        """Keeps what ``mamba_ssm``'s fused kernel keeps, and computes the rest again."""

        @staticmethod
        def forward(context: Any, projected: Any, *values: Any) -> Any:
            output, normed = scan(part, projected, dict(zip(weights, values, strict=True)))
            context.save_for_backward(projected, output, *values)
            return normed

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            projected, _, *values = (one.detach().requires_grad_() for one in context.saved_tensors)
            with torch.enable_grad():
                named = dict(zip(weights, values, strict=True))
                _, normed = scan(part, projected, named)
                return torch.autograd.grad(normed, [projected, *values], gradient)

    convolved = part.inner + 2 * part.groups * part.state
    weights = {
        "conv": torch.randn(convolved, 1, part.conv),
        "bias": torch.randn(part.heads),
        "rate": torch.randn(part.heads) / 10,
        "skip": torch.randn(part.heads),
    }
    weights = {name: value.bfloat16().requires_grad_() for name, value in weights.items()}
    into = torch.nn.Linear(HIDDEN, part.projected, bias=False, dtype=torch.bfloat16)
    out = torch.nn.Linear(part.inner, HIDDEN, bias=False, dtype=torch.bfloat16)
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Any:
        normed = functional.layer_norm(tokens, (HIDDEN,))
        return tokens + out(Fused.apply(into(normed), *weights.values()))

    own = [*weights.values(), into.weight, out.weight]
    # The rest are the statistics of the norm.
    assert kept_bytes(forward, own) == pytest.approx(part.kept(HIDDEN, 1, 1) * TOKENS, rel=0.01)
    assert all(weight.grad is not None for weight in own)

    trained = [*own, torch.ones(HIDDEN), torch.ones(part.inner), torch.ones(convolved)]
    assert sum(one.numel() for one in trained) == part.parameters(HIDDEN)


@pytest.mark.torch
@pytest.mark.parametrize("source", [96, 288])
def test_a_real_cross_attention_keeps_what_the_part_says(source: int) -> None:
    import torch
    from torch.nn import functional

    part = CrossAttention(heads=4, head_size=16, source=source, target=TOKENS)
    torch.manual_seed(0)
    matrices = {
        name: torch.nn.Linear(HIDDEN, part.width, bias=False, dtype=torch.bfloat16)
        for name in ("queries", "keys", "values")
    }
    out = torch.nn.Linear(part.width, HIDDEN, bias=False, dtype=torch.bfloat16)
    tokens = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    encoded = torch.randn(1, source, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def heads(name: str, inputs: Any) -> Any:
        return matrices[name](inputs).view(1, -1, part.heads, part.head_size).transpose(1, 2)

    def forward() -> Any:
        normed = functional.layer_norm(tokens, (HIDDEN,))
        mixed = functional.scaled_dot_product_attention(
            heads("queries", normed), heads("keys", encoded), heads("values", encoded)
        )
        return tokens + out(mixed.transpose(1, 2).reshape(1, TOKENS, part.width))

    own = [encoded, out.weight, *(one.weight for one in matrices.values())]
    # The rest are the norm's statistics, and the softmax's: 4 bytes for each head and token.
    sums = 4 * part.heads * TOKENS
    expected = part.kept(HIDDEN, 1, 1) * TOKENS
    assert kept_bytes(forward, own) - sums == pytest.approx(expected, rel=0.02)
    count = sum(one.numel() for one in own[1:]) + HIDDEN
    assert count == part.parameters(HIDDEN)


@pytest.mark.torch
def test_a_real_gated_convolution_keeps_what_the_part_says() -> None:
    import torch
    from torch.nn import functional

    part = ShortConv(conv=3)
    torch.manual_seed(0)
    into = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False, dtype=torch.bfloat16)
    out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    weight = torch.randn(HIDDEN, 1, part.conv, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Any:
        before, after, values = into(functional.layer_norm(tokens, (HIDDEN,))).chunk(3, dim=-1)
        gated = (before * values).transpose(1, 2)
        mixed = functional.conv1d(gated, weight, padding=part.conv - 1, groups=HIDDEN)
        return tokens + out(after * mixed[..., :TOKENS].transpose(1, 2))

    own = [into.weight, out.weight, weight]
    # The rest are the statistics of the norm, and the padding.
    assert kept_bytes(forward, own) == pytest.approx(part.kept(HIDDEN, 1, 1) * TOKENS, rel=0.02)
    assert sum(one.numel() for one in own) + HIDDEN == part.parameters(HIDDEN)


def test_flops_of_a_mixture_with_state_space_layers_are_the_published() -> None:
    # Megatron-Bridge's performance summary, release 26.06, Nemotron 3 Nano on 16 H100s.
    published = 328e12 / 14719
    shape = model("nemotron-3-nano").with_lengths(8192, 131072)
    # Its formula takes twice the hidden size for the inner width, which is 4,096.
    more = 2 * 2688 - 4096
    mamba = sum(
        count * 3 * more * (2 * 2688 * 3 + 7 * 128) for kind, count in shape.kinds if kind.parts
    )
    assert flop_per_token(shape, causal=True) + mamba == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("name", "length", "teraflops", "tokens", "further", "layers"),
    [
        ("deepseek-v4-flash", 4096, 748, 8224, 1, 1),
        ("deepseek-v4-flash", 4096, 706, 7776, 1, 1),
        ("nemotron-3-super", 8192, 831, 9856, 2, 2),
        ("nemotron-3-ultra", 8192, 1281, 3552, 2, 2),
    ],
)
def test_flops_of_models_that_predict_further_tokens_are_the_published(
    name: str, length: int, teraflops: float, tokens: float, further: int, layers: int
) -> None:
    # Megatron-Bridge's performance summary, release 26.08. Each further token takes the last
    # layers again, a product that joins two hidden states, and the output layer.
    shape = model(name)
    shape = shape.with_lengths(length, shape.vocab)
    kinds = [shape.pattern[-1]]
    if layers == 2:
        kinds += [next(kind for kind in shape.pattern if kind.heads)]
    own = sum(kind.layer_flop + attention_flop(kind, causal=True) for kind in kinds)
    one = own + 2 * (2 * shape.hidden**2 + shape.head_parameters)
    published = teraflops * 1e12 / tokens
    assert flop_per_token(shape, causal=True) + 3 * further * one == pytest.approx(
        published, rel=0.02
    )


def test_keys_that_a_token_sees() -> None:
    window = CompressedAttention(
        heads=1, head_size=1, query_rank=1, groups=1, output_rank=1, window=128, length=1024
    )
    seen = sum(min(place + 0.5, 128) for place in range(1024)) / 1024
    assert window.model_flop == pytest.approx(4 * seen, rel=1e-3)
    heavy = replace(window, rate=128)
    assert heavy.model_flop == pytest.approx(4 * (seen + 8 / 2), rel=1e-3)
    sparse = replace(window, rate=4, chosen=64, index_heads=2, index_size=8)
    entries = sum(min(place + 0.5, 64) for place in range(256)) / 256
    assert sparse.model_flop == pytest.approx(4 * (seen + entries) + 256 * 2 * 8, rel=1e-3)
    # A short sequence has fewer entries than the indexer may choose.
    short = replace(sparse, length=128)
    assert short.model_flop == pytest.approx(4 * (128 / 2 + 32 / 2) + 32 * 2 * 8)
    assert sparse.scaled(0.125) == short


def test_flops_of_products_and_scans() -> None:
    mamba = Mamba2(heads=8, head_size=64, state=128, chunk=256)
    products = sum(2 * rows * k * n for rows, k, n in mamba.products(1024, 1))
    assert products == 2 * 1024 * (2 * 512 + 2 * 128 + 8) + 2 * 512 * 1024
    assert mamba.kernel_flop == 2 * 256 * (128 + 512) + 4 * 128 * 512
    halves = [sum(2 * rows * k * n for rows, k, n in mamba.products(1024, t)) for t in (1, 2)]
    assert halves[0] == 2 * halves[1]
    net = DeltaNet(key_heads=16, key_size=128, heads=32, value_size=128)
    assert net.model_flop == 7 * 32 * 128 * 128
    assert net.kernel_flop > net.model_flop
    kimi = KimiDelta(key_heads=32, key_size=128, heads=32, value_size=128, gate_rank=128)
    products = sum(2 * rows * k * n for rows, k, n in kimi.products(2304, 1))
    # Four matrices of 4,096 columns, one for the heads, and two gates of rank 128.
    assert products == 2 * (4 * 2304 * 4096 + 2304 * 32 + 2 * 128 * (2304 + 4096))
    halves = [sum(2 * rows * k * n for rows, k, n in kimi.products(2304, t)) for t in (1, 2)]
    assert halves[0] == 2 * halves[1]
