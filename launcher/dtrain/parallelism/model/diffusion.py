"""The shape of a diffusion transformer, from the ``config.json`` of Hugging Face Diffusers.

The tokens are patches of a latent image, and those of a text if attention joins both. ``vocab`` is
the number of outputs for each patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.parallelism.model.config_file import ConfigFile
from dtrain.parallelism.model.hybrids import MOST_LAYERS
from dtrain.parallelism.model.parts import Modulation, Twin
from dtrain.parallelism.model.shape import Shape

_CLASSES = ("DiTTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel")
_TIME = 256
"""Sines and cosines of the time step."""
_FLUX_PATCHES, _FLUX_TEXT = 4096, 512
"""Tokens of an image of 1024 × 1024 pixels, and of its text."""
_SD3_TEXT = 333
"""Tokens of the text: 77 of CLIP and 256 of T5 (arXiv 2403.03206, section 4 and figure 2)."""


def is_diffusion(values: Mapping[str, Any]) -> bool:
    """Whether a file describes a diffusion transformer that dtrain has a shape for."""
    return values.get("_class_name") in _CLASSES


def diffusion_shape(file: ConfigFile) -> Shape:
    """Return the shape. A sequence is the tokens of image and text."""
    hidden = file.needed("num_attention_heads") * file.needed("attention_head_dim")
    patch = file.count("patch_size") or 1
    channels = file.needed("in_channels")
    outputs = patch**2 * (file.count("out_channels") or channels)
    block = Shape(
        layers=file.needed("num_layers"),
        hidden=hidden,
        heads=file.count("num_attention_heads"),
        kv_heads=file.count("num_attention_heads"),
        ffn_hidden=4 * hidden,
        vocab=outputs,
        seq_len=max(1, file.count("sample_size") // patch) ** 2,
        head_size=file.count("attention_head_dim"),
        gated=False,
        causal=False,
        parts=(Modulation(6),),
        # The patches' embedding, a network of the time step, and the last norm's modulation.
        input_parameters=(patch**2 * channels + _TIME + 3 * hidden) * hidden,
        name=file.name or str(file.values["_class_name"]),
    )
    match file.values["_class_name"]:
        case "DiTTransformer2DModel":
            classes = (file.count("num_embeds_ada_norm") or 1000) + 1
            return _embedded(block, classes * hidden)
        case "SD3Transformer2DModel":
            text = file.needed("joint_attention_dim") * hidden
            pooled = (file.needed("pooled_projection_dim") + hidden) * hidden
            joint = replace(_joint(block), seq_len=block.seq_len + _SD3_TEXT)
            return _embedded(joint, text + pooled)
    # A second kind of block has one stream, whose MLP and attention read the same norm (Flux).
    text = file.needed("joint_attention_dim") * hidden
    pooled = (file.needed("pooled_projection_dim") + hidden) * hidden
    guidance = (_TIME + hidden) * hidden if file.get("guidance_embeds") else 0
    block = replace(block, seq_len=_FLUX_PATCHES + _FLUX_TEXT)
    single = replace(block, layers=1, parallel=True, parts=(Modulation(3),), name="")
    both = replace(_joint(block), layers=1, name="")
    count = file.needed("num_single_layers")
    if block.layers + count > MOST_LAYERS:
        file.refuse(f"{block.layers + count} layers are more than dtrain plans for")
    pattern = (both,) * block.layers + (single,) * count
    whole = replace(block, layers=len(pattern), parts=(), pattern=pattern)
    return _embedded(whole, text + pooled + guidance)


def _joint(block: Shape) -> Shape:
    """Return a block of MM-DiT: image and text have their own matrices, and one attention."""
    alone = replace(block, layers=1)
    return replace(block, parts=(*block.parts, Twin(alone.layer_parameters())))


def _embedded(shape: Shape, more: int) -> Shape:
    """Return ``shape`` with ``more`` parameters before its layers."""
    return replace(shape, input_parameters=shape.input_parameters + more)
