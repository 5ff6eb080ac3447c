"""Attention for Hugging Face models, registered as "curvlens", with soft caps, sinks and learned biases."""

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
"""Arguments that do not change the result. The mask already contains what they say about visible keys."""


def register() -> str:
    """Register attention in transformers and return its name, "curvlens".

    Call ``model.set_attn_implementation(curvlens.sdpa.register())``. Models with their own attention code, outside of
    transformers' AttentionInterface (BLOOM, MPT), warn and do not change. Do not pass
    ``attn_implementation="curvlens"`` when a model is created: there is no warning then.

    Models with ``"sdpa"`` need no registration inside `second_order` or in a `Problem`. Models with soft caps or
    attention sinks, such as Gemma 2 and GPT-OSS, need it to avoid storing all scores.
    """
    try:
        utils = importlib.import_module("transformers.modeling_utils")
        masking = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        raise CurvlensError("Hugging Face models need transformers. Run pip install 'curvlens[hf]'.") from error
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
    """An attention function for transformers: returns the output (B, L, heads, e) and None for the weights."""
    unknown = [name for name, x in others.items() if x is not None and x is not False and name not in HARMLESS]
    if unknown:
        raise CurvlensError(
            f"{type(module).__name__} passes the argument {unknown[0]!r} to its attention, which the attention of "
            "curvlens does not support. Use model.set_attn_implementation('eager')."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    options: dict[str, Any] = {"is_causal": causal, "scale": scaling, "softcap": softcap, "enable_gqa": True}
    if s_aux is None:
        mixed = scaled_dot_product_attention(query, key, value, attention_mask, dropout, bias=position_bias, **options)
        return mixed.transpose(1, 2).contiguous(), None
    if position_bias is not None:
        raise CurvlensError(
            f"{type(module).__name__} has attention sinks and a bias; curvlens does not support both at once. Use "
            "model.set_attn_implementation('eager')."
        )
    # A sink is an extra first key with a learned score and the value 0.
    sinks = s_aux.reshape(1, -1, 1, 1).to(query.dtype)
    bias = torch.cat([sinks, sinks.new_zeros(1, sinks.shape[1], 1, key.shape[2])], -1)
    key, value = (torch.cat([torch.zeros_like(x[:, :, :1]), x], 2) for x in (key, value))
    if attention_mask is not None:
        free = torch.zeros_like(attention_mask[..., :1])
        attention_mask = torch.cat([~free if free.dtype == torch.bool else free, attention_mask], -1)
    options["is_causal"] = "bottom-right" if causal else False
    mixed = scaled_dot_product_attention(query, key, value, attention_mask, dropout, bias=bias, **options)
    return mixed.transpose(1, 2).contiguous(), None
