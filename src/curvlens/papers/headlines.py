"""Select the one number of a finding that is shown beside its verdict, with its label.

The number is taken from the text of the finding by the words around it; no number is typed in here. If the words are
missing, as in quick settings, no number is shown.
"""

from __future__ import annotations

import re

from curvlens.papers.verdicts import Finding

_VALUE = r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?"
_NUMBER = rf"({_VALUE}(?: ± {_VALUE}| \({_VALUE} to {_VALUE}\)| to {_VALUE}| of {_VALUE})?)"

HEADLINES = {
    "entries": ("orders of magnitude at σ = 0.2", "in a seed: … # (σ = 0.2)"),
    "growth-value": ("power for σ ≤ 0.1", "σ^# for σ ≤ 0.1"),
    "growth-query": ("power for σ ≤ 0.1", "σ^# for σ ≤ 0.1"),
    "growth-practical": ("slopes of H(Q), predicted 5", "H(Q) # (5"),
    "growth-query-outer": ("power for σ ≤ 0.1", "σ^# for σ ≤ 0.1"),
    "growth-all": ("power of H_f(Q,K), predicted 3", "H_f(Q,K) # (3"),
    "growth-tied": ("power of H(V), predicted 2", "H(V) #,"),
    "growth-positions": ("power of H(V), predicted 2", "H(V) #,"),
    "value-functional": ("of ‖H(V)‖ before a GELU MLP", "a GELU MLP: # at σ = 0.01"),
    "jacobians": ("power of ∂F/∂W_Q, predicted 3", "∂F/∂W_Q # (3"),
    "outer-large": ("‖H_o‖/‖H_f‖ over the residual", "of the residual: # for the whole"),
    "pre-ln": ("difference of slopes, without: 3", "a difference of #;"),
    "moments": ("power of H_f(Q,Q), predicted 3", "H_f(Q,Q) # (3"),
    "even-at-start": ("of the largest entropy, largest d_K", "variance 1/d_K: … #, the last"),
    "similar": ("times as large, H_o, even", ", # times as large"),
    "dispersed": ("share, 12 tokens of size 4", "tokens of size 4: … # over 12"),
    "one-hot": ("layers", "in # layers"),
    "weights": ("largest distance of a power", "predictions by up to # (to be met"),
    "linear-blocks": ("power of H_o(Q,Q), predicted 6", "H_o(Q,Q) #,"),
    "softmax-entries": ("orders of magnitude apart", "are # orders of magnitude apart"),
    "softmax-query": ("orders of magnitude, query", "in a seed by # (query)"),
    "softmax-indefinite": ("negative share, query, at least", "with softmax at least # (Q)"),
    "table-1": ("power of H_o, predicted 6", "linear attention: H_o #,"),
    "depth-linear": ("last of 3 layers, predicted 54", "last layer of 3: # (54)"),
    "depth-mlp": ("power farthest from 2", "farthest from 2 is #;"),
    "cnn": ("power of H_o, MLP: 2", "linear CNN: H_o #,"),
    "deep-same": ("distance for σ from 0.1 to 1", "# for σ from 0.1 to 1;"),
    "deep-lower": ("of pairs, H_o(Q)", "# (H_o(Q):"),
    "deep-beyond": ("more in H(V) with two layers", "beside a single layer #,"),
    "deep-top": ("slope of H(Q), predicted 5", "H(Q), predicted 5: #,"),
    "deep-value-functional": ("‖H_f(V)‖/‖H_o(V)‖", "below the top is #;"),
    "temperature": ("power of the T-outer part", "falls with t^# and"),
    "t-pairs": ("of the largest is left in pairs", "in pairs to # of the largest"),
    "t-rank": ("layers exceed it", "Exceeded in # layers"),
    "single-matrix": ("largest distance", "differentiation, to #;"),
    "t-bulk": ("share for d_K = 2, σ = 1", "d_K = 2: … # (σ = 1)"),
    "heads": ("entries of H_f left, most heads", "not zero … #; ‖H_f‖/‖H_o‖"),
    "low-rank-value": ("of ‖H_f‖, 1 head", "at most # (heads: 1)"),
    "low-rank-moment": ("power of M1", "to the power # for factors"),
    "one-rate": ("condition, one per matrix over one for all", "over one for all #,"),
    "scalar-bulk": ("outside, d_K = 8", "d_K = 8: … outside in #,"),
    "scalar-condition": ("times larger, d_K = 2", "d_K = 2: #;"),
    "ggn-top": ("apart, scalar attention, residual 0.1", "scalar attention: #,"),
    "sink-scalar": ("of the bulk at a bias of 4", "4: #;"),
    "outlier-activations": ("times the bulk", "bulk #,"),
    "sink-gpt": ("times for each unit of bias", "for each unit of bias, by #"),
    "depth-growth": ("times ‖H‖, most layers over one, Pre-LN", "Pre-LN #;"),
    "bound": ("points above the bound", "a bound below the truth: # from norms"),
    "norm-bounded": ("times its value at a spread of 1", ", # times its value"),
    "relu-simple": ("of ‖GGN‖ in (up, down)", "(up, down) #;"),
    "norm-couples": ("times, Pre-LN over no norm", "over without: Pre-LN #;"),
    "softmax-couples": ("times, softmax over attention held", "Softmax over the others: softmax, attention held #"),
    "diagonal-network": ("of its row, layer 1", "layer 1 #;"),
    "zero-blocks": ("zero blocks of pairs, at most", "at most # have a zero block"),
    "training-phases": ("times as fast at first", "a random walk has 1: #;"),
    "convergence": ("power of k, distance from the limit", "its limit k^#;"),
    "second-order": ("of the other terms, all directions, trained", "after training, all directions #"),
    "critical-batch": ("of the measured, one step, width 16", "one step from 50 steps of training at width 16: #"),
    "critical-batch-simple": ("of it, one step, width 16", "one step from 50 steps of training at width 16: #"),
    "convergence-rate": ("times the rate, no decay", "without decay, gradient descent: seen over predicted #,"),
    "conditioning-speed": ("power, weight decay", "which sets it: #"),
    "diagonal": ("of its row, attention, Pre-LN", "attention #,"),
    "conditioning-data": ("power of D, lowest loss", "at the lowest loss on other pairs D^(#);"),
    "spectrum-size": ("power of N, range, lowest loss", "on other pairs λ_max − λ_min N^(#),"),
    "scaling-exponents": ("power of D, ‖H‖₂, predicted −0.5", "spectral norm D^(#);"),
    "loss-falls": ("steps that lower the loss, at 0.98", "it falls in #."),
    "critical-rate": ("of λ_max after 400 steps", "after 400 steps of training # by line search"),
    "edge-steps": ("times, gradient descent at 1.02", "gradient descent … and # at 1.02"),
    "advice-adaptive": ("times the loss of SGD, Adam", ": Adam #"),
    "advice-momentum": ("times the loss of SGD, momentum", "momentum 0.9 #"),
    "advice-layerwise": ("times the loss of SGD, by layer", "one step size a layer #"),
    "block-order": ("times, FFN over QK", "FFN over QK #"),
    "block-heterogeneity": ("times the distance, with scales", "at initialisation … ratio #"),
    "quadratic-course": ("steps until it departs, gradient descent, learning", "gradient descent, while it learns: #"),
    "ggn-top-training": ("relative difference after 800 steps", "after 800 steps #"),
    "adam-edge": ("of 38/η in the last third", "η = 0.0006 # (from"),
    "gd-edge": ("of 2/η in the last third", "η = 0.02 # (from"),
    "scaling-explained": ("of the error, with ‖H‖₂", "intervals): the spectral norm #"),
}
"""For each claim: the label of the number, and the words around it. # is the number, … any words."""


def headline(finding: Finding) -> tuple[str, str]:
    """The number of a finding with its error, and what it is; two empty texts if there is none.

    >>> headline(Finding("softmax-query", "holds", "Softmax moves it in a seed by -1.57 ± 0.01 (query)."))
    ('-1.57 ± 0.01', 'orders of magnitude, query')
    """
    label, around = HEADLINES.get(finding.claim, ("", ""))
    pattern = re.escape(around).replace(r"\#", _NUMBER).replace("…", ".*?")
    found = re.search(pattern, finding.measured) if around else None
    return (found[1], label) if found else ("", "")
