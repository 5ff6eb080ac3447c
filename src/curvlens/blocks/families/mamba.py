"""Mamba: a state-space mixer in the place of attention and feed-forward.

Roles of ``ssm``: ``up`` and ``gate`` (the halves of the input projection), ``conv``, ``dt``, ``b`` and ``c`` (what
selects the step, the input and the output of the state), ``a`` (its decay), ``d`` (the skip), ``down``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from curvlens.blocks.family import Family, Rule, each, embedding, linear, norm


def _sizes(module: nn.Module) -> Mapping[str, int]:
    rank, states = getattr(module, "time_step_rank", None), getattr(module, "ssm_state_size", None)
    return {} if rank is None or states is None else {"dt": rank, "b": states, "c": states}


MIXER, SSM = "layers.{i}.mixer", "h.{i}.ssm"

FAMILY = Family(
    "Mamba",
    each(
        [
            Rule(f"{MIXER}.in_proj.weight", f"{SSM}.*", "(up/gate out) in"),
            Rule(f"{MIXER}.in_proj.bias", f"{SSM}.*", "(up/gate out)"),
            Rule(f"{MIXER}.conv1d.weight", f"{SSM}.conv", "channel x time"),
            Rule(f"{MIXER}.conv1d.bias", f"{SSM}.conv", "channel"),
            Rule(f"{MIXER}.x_proj.weight", f"{SSM}.*", "dt+b+c in"),
            Rule(f"{MIXER}.A_log", f"{SSM}.a", "channel state"),
            Rule(f"{MIXER}.D", f"{SSM}.d", "channel"),
        ],
        linear(f"{MIXER}.dt_proj", f"{SSM}.dt"),
        linear(f"{MIXER}.out_proj", f"{SSM}.down"),
        norm("layers.{i}.norm", "h.{i}.norm1"),
        embedding("embeddings", "embed"),
        norm("norm_f", "final_norm"),
        linear("lm_head", "unembed"),
    ),
    _sizes,
    checked=("mamba",),
    not_for=("mamba2", "nemotron_h"),  # gate, states and steps side by side in one projection
)
