"""Attention for models of Hugging Face, under a name of its own: also with soft caps, sinks and learned biases."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.errors import CurvlensError
from curvlens.sdpa.attention import scaled_dot_product_attention

NAME = "curvlens"
HARMLESS = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "layer_idx", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "position_embeddings", "position_ids", "return_dict",
    "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip
"""Arguments that say nothing of the result: the mask has all that they say of who sees whom."""


def register() -> str:
    """Make attention known to transformers under the name it returns, "curvlens".

    ``model.set_attn_implementation(curvlens.sdpa.register())``. Models that have an attention of their own, beside
    transformers' AttentionInterface, warn there and stay as they are; ``attn_implementation="curvlens"`` where a model
    is made does not notice these (BLOOM, MPT), and is not to be used.
    Inside `second_order`, and in every problem of curvlens, models with ``"sdpa"`` need none of this; those with soft
    caps or attention sinks, as Gemma 2 and GPT-OSS, do, if their scores are not all to be held.
    """
    try:
        utils = importlib.import_module("transformers.modeling_utils")
        masking = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        raise CurvlensError("Models of Hugging Face need transformers: pip install 'curvlens[hf]'.") from error
    utils.AttentionInterface.register(NAME, attention)
    masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(B, L, heads, e), and no weights; what transformers calls an attention function."""
    unknown = [name for name, x in others.items() if x is not None and x is not False and name not in HARMLESS]
    if unknown:
        raise CurvlensError(
            f"{type(module).__name__} gives its attention {unknown[0]!r}, which that of curvlens does not know. Use "
            "model.set_attn_implementation('eager')."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    options: dict[str, Any] = {"is_causal": causal, "scale": scaling, "softcap": softcap, "enable_gqa": True}
    if s_aux is None:
        mixed = scaled_dot_product_attention(query, key, value, attention_mask, dropout, bias=position_bias, **options)
        return mixed.transpose(1, 2).contiguous(), None
    if position_bias is not None:
        raise CurvlensError(f"{type(module).__name__} has attention sinks and a bias, which curvlens does not join.")
    # A sink is a key in front of all others, of a score that is learned, with nothing to mix in.
    sinks = s_aux.reshape(1, -1, 1, 1).to(query.dtype)
    bias = torch.cat([sinks, sinks.new_zeros(1, sinks.shape[1], 1, key.shape[2])], -1)
    key, value = (torch.cat([torch.zeros_like(x[:, :, :1]), x], 2) for x in (key, value))
    if attention_mask is not None:
        free = torch.zeros_like(attention_mask[..., :1])
        attention_mask = torch.cat([~free if free.dtype == torch.bool else free, attention_mask], -1)
    options["is_causal"] = "bottom-right" if causal else False
    mixed = scaled_dot_product_attention(query, key, value, attention_mask, dropout, bias=bias, **options)
    return mixed.transpose(1, 2).contiguous(), None
