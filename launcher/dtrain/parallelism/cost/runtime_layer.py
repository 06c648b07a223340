"""What one layer holds for one micro-batch under ``dtrain.runtime``, in bytes or elements.

The sizes are those of PyTorch's autograd and DTensor as the runtime drives them, measured with
``scripts/planner/track_memory.py``. They do not depend on the stage, the data ranks or the
sharding, so many layouts of a search share them.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cost.layer import BYTES
from dtrain.parallelism.model.shape import Shape
from dtrain.records import cached_property, dataclass
from dtrain.runtime.layout import Layout, Recompute


def runtime_layer(shape: Shape, layout: Layout, assumed: Assumptions) -> Layer:
    """Return the layer of a layout."""
    compute = BYTES[assumed.precision]
    whole = layout.tensor == layout.pipeline == layout.expert == 1
    copied = layout.sharding == "none" and not layout.offload and layout.reduce == "fp32"
    return _layer(shape, compute, whole and copied and compute == 2, *_fields(layout))


_fields = attrgetter(
    "tensor", "context", "expert", "micro_batch", "recompute", "sequence_parallel",
    "offload_activations",
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A layer of one rank. Sizes are computed on first use."""

    shape: Shape
    compute: int
    """Bytes of an element in computation."""
    autocast: bool
    """Whether autocast, not FSDP, casts: true if nothing is sharded or split."""
    tensor: int
    context: int
    expert: int
    micro_batch: int
    recompute: Recompute
    sequence_parallel: bool
    offload_activations: bool

    @cached_property
    def tokens(self) -> float:
        return self.shape.seq_len * self.micro_batch / self.context

    @cached_property
    def stream(self) -> float:
        """Elements of the residual stream for each token."""
        return self.shape.hidden / (self.tensor if self.sequence_parallel else 1)

    @cached_property
    def around(self) -> float:
        """Bytes of the residual stream, and of a copy that tensor ranks have gathered."""
        return self.compute * (self.stream + self.shape.hidden) * self.tokens

    @cached_property
    def parameters(self) -> float:
        """Of a mixture, with this rank's experts."""
        shape = self.shape
        elsewhere = shape.experts * shape.expert_parameters * (1 - 1 / self.expert)
        return (shape.layer_parameters() - elsewhere) / self.tensor

    @cached_property
    def bank(self) -> float:
        """Parameters of the experts, if several ranks spread them."""
        if self.expert == 1:
            return 0.0
        return self.shape.experts * self.shape.expert_parameters / self.expert / self.tensor

    @cached_property
    def kept(self) -> float:
        """Bytes of the GPU that the layer keeps for the backward pass."""
        if self.offload_activations and self.tensor == 1:
            return 0.0
        return self.saved(self.recompute)

    def saved(self, recompute: Recompute) -> float:
        """Return the bytes that the layer saves for the backward pass."""
        shape, t, c = self.shape, self.tensor, self.compute
        if recompute == "full":
            return c * self.stream * self.tokens
        if recompute == "selective":
            # The outputs of attention and of every second product: queries, values, the MLP's
            # gate, and its end before tensor ranks add it up.
            queries, _, grouped, values = self._widths
            width = shape.ffn_hidden * self._used_experts
            each = self.stream + (queries + grouped + values + width) / t + shape.hidden
            return (c * each + 4 * shape.heads / t) * self.tokens
        # The inputs of both norms, and the products' inputs, which tensor ranks gather whole.
        inputs = 2 * c * self.stream + 2 * c * shape.hidden
        if self.autocast:
            # The stream and the norms are in 32 bits, and each product casts its own input.
            inputs = 2 * 4 * self.stream + (3 + (2 if shape.gated else 1)) * c * shape.hidden
        if shape.dropout:
            inputs += 2 * shape.hidden
        statistics = 4 * (shape.heads / t + 2 * self.stream / shape.hidden)
        tables = 8 * shape.seq_len / self.context * shape.head_size if shape.gated else 0
        return (inputs + statistics) * self.tokens + self._attention + self._mlp + tables

    @cached_property
    def sent_to_experts(self) -> float:
        """Bytes of tokens in a mixture's forward pass that no backward pass needs: outputs to be
        joined; with ranks that exchange tokens, also both sides of the exchange and its result."""
        return (4 if self.expert > 1 else 1) * self._routed

    @cached_property
    def mlp_backward(self) -> float:
        """Bytes of the MLP's backward pass at its peak: its gradients, and what it works with,
        without the activations of lower layers."""
        c, shape = self.compute, self.shape
        if self.offload_activations and self.tensor == 1:
            # A product's inputs return one after the other: two, and the gradient of their product.
            saved = c * (self.stream + shape.hidden + 3 * self._width) * self.tokens
        else:
            saved = self.saved("none") + c * self.stream * self.tokens
        if self.recompute == "selective":
            saved += c * self.stream * self.tokens
        # Two more of the MLP's widest tensors.
        saved += 2 * c * self._width * self.tokens
        matrix = shape.hidden * shape.ffn_hidden / self.tensor
        highest = c * matrix + saved
        if shape.experts:
            # Experts compute one after the other: the first one, and the last one.
            last = saved - self._mlp * (1 - 1 / self._experts_here) + self._routed
            highest = max(highest, c * (self.parameters - self._attention_parameters) + last)
            if self.recompute != "none":
                highest = max(highest, self.saved("none") + self.sent_to_experts)
        return highest

    @cached_property
    def attention_backward(self) -> float:
        """As `mlp_backward`, for attention and for the end of the layer."""
        c, shape = self.compute, self.shape
        # Queries turn back in 32 bits.
        queries = shape.heads * shape.head_size / self.tensor * self.tokens
        turned = 6 * queries if shape.gated else 0.0
        attention = c * (self.parameters - self._attention_parameters) + (
            self.around + self._attention + turned
        )
        return max(attention, c * (self.parameters - self.bank) + self.around)

    @property
    def _attention_parameters(self) -> float:
        return self.shape.attention_parameters / self.tensor

    @property
    def _used_experts(self) -> int:
        """Experts for each token; 1 for an MLP."""
        shape = self.shape
        return shape.experts_per_token + shape.shared_experts if shape.experts else 1

    @property
    def _experts_here(self) -> int:
        """Experts on this rank; 1 for an MLP."""
        return max(1, self.shape.experts // self.expert)

    @property
    def _width(self) -> float:
        """Inner width of an MLP for each token; of experts, which compute one after the other, of
        one of them."""
        return self.shape.ffn_hidden * self._used_experts / self._experts_here / self.tensor

    @cached_property
    def _attention(self) -> float:
        """Bytes that the layer saves of queries, keys, values and attention's output."""
        shape, t, c, context = self.shape, self.tensor, self.compute, self.context
        queries, keys, grouped, values = self._widths
        each = c * (queries + keys + grouped + values) / t
        if shape.qk_norm:
            each += c * (queries + keys) / t
        if context > 1:
            # Keys and values of the whole sequence, and a copy that joins the two outputs.
            each += c * ((context - 1) * (keys + grouped) + values) / t
        if shape.kv_rank:
            each += c * (queries - keys) / t
            each += c * (shape.query_rank + shape.kv_rank + shape.rope_head_size)
        return each * self.tokens

    @cached_property
    def _mlp(self) -> float:
        """Bytes that the layer saves of what its MLP or its experts multiply."""
        shape, c = self.shape, self.compute
        width = shape.ffn_hidden * self._used_experts / self.tensor
        # The tokens sent to experts, and the experts' outputs.
        return c * (4 if shape.gated else 2) * width * self.tokens + 2 * self._routed

    @cached_property
    def _routed(self) -> float:
        """Bytes of the layer's tokens, once for each expert that they are sent to."""
        shape = self.shape
        return self.compute * shape.hidden * shape.experts_per_token * self.tokens

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """Queries, keys, values of the key heads, and values of all heads, for each token."""
        shape = self.shape
        values = shape.heads * (shape.value_head_size or shape.head_size)
        keys = shape.kv_heads * shape.head_size
        grouped = values if shape.value_head_size else keys
        return shape.heads * shape.head_size, keys, grouped, values


_layer = lru_cache(maxsize=1 << 12)(Layer)
