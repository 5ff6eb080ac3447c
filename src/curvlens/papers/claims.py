"""Every claim of the papers that can be measured, in the order of the sources.

A new one is added here; the experiment that measures it names it in a `Finding`. Until there is one, it is open.
"""

from __future__ import annotations

from curvlens.papers.sources import (
    ADAM_EDGE,
    ARTICLE,
    BLOCK_ORDER,
    GD_EDGE,
    HETEROGENEITY,
    NOISE_SCALE,
    OUTLIERS,
    PAPER,
    SECOND,
)
from curvlens.papers.verdicts import Claim

SLIDES = "slides on the same"
"""In a table that begins with the paper they are on."""

CLAIMS = (
    Claim(
        "entries",
        "At initialisation the entries of the query block are about two orders of magnitude smaller than those of "
        "the value block.",
        f"{PAPER}, Figure 1 and Section 4.1",
    ),
    Claim("growth-value", "The value block grows with σ².", f"{PAPER}, Equation 5 and Figure 3a"),
    Claim(
        "growth-query",
        "The query block grows like its functional part, with σ⁵, not like its outer part.",
        f"{PAPER}, Section 3.1 and Figure 3a",
    ),
    Claim(
        "growth-practical",
        "In the practical range, σ in (0, 1), the query and the value block follow Equation 5: σ⁵ and σ².",
        f"{PAPER}, Figures 3a and 5",
    ),
    Claim("growth-query-outer", "The outer part of the query block grows with σ⁶.", f"{PAPER}, Equation 5"),
    Claim(
        "growth-all",
        "All blocks of query, key and value, off the diagonal as well, grow with the powers of Equation 5, also with "
        "cross-entropy and a full block.",
        f"{PAPER}, Equation 5 and Section 3.1",
    ),
    Claim(
        "growth-tied",
        "The growth rates of Equation 5 extend to a full GPT-2 block: read with the unembedding tied to the embedding, "
        "as in GPT-2.",
        f"{PAPER}, Section 3.1 and Appendix F",
    ),
    Claim(
        "growth-positions",
        "The growth rates of Equation 5 extend to a full GPT-2 block: read with position embeddings that keep their "
        "standard deviation while that of the tokens varies.",
        f"{PAPER}, Section 3.1 and Appendix F",
    ),
    Claim("value-functional", "The functional part of the value block is zero.", f"{PAPER}, Theorem 3.2"),
    Claim(
        "jacobians",
        "‖∂F/∂W_V‖ grows with σ, ‖∂F/∂W_Q‖ and ‖∂F/∂W_K‖ with σ³.",
        f"{PAPER}, Section 3.1",
    ),
    Claim(
        "outer-large",
        "If the residual is ignored, the outer part dominates the Hessian for large tokens.",
        f"{PAPER}, Section 3.1",
    ),
    Claim(
        "pre-ln",
        "With Pre-LN the growth rates of the query and the value block differ much less than without.",
        f"{PAPER}, Section 4.3 and Figure 3b",
    ),
    Claim(
        "moments",
        "The outer part of the value block depends on the first attention moment, that of the query-key blocks on the "
        "second, and the functional query-key blocks on the third as well.",
        f"{PAPER}, Section 3.2 and Remark 3.1",
    ),
    Claim(
        "even-at-start",
        "At initialisation attention does not depend on the data for large d_K: it is even.",
        f"{PAPER}, Section 3.2",
    ),
    Claim("similar", "Sequences of more similar tokens have smaller query-key blocks.", f"{PAPER}, Section 3.2"),
    Claim(
        "dispersed",
        "With attention spread over many tokens the outer query-key blocks dominate the Hessian.",
        f"{PAPER}, Section 3.2",
    ),
    Claim("one-hot", "With one-hot attention the query-key blocks vanish.", f"{PAPER}, Section 3.2"),
    Claim(
        "weights",
        "Beyond their influence through softmax the blocks depend on the weights with the powers of Section 3.3: "
        "quadratic, linear or not at all.",
        f"{PAPER}, Section 3.3",
    ),
    Claim(
        "linear-blocks",
        "Without softmax every block of the outer part is cubic in Σ = XᵀX/L, and the functional part is block-hollow.",
        f"{PAPER}, Remark 4.1 and Section 4.1",
    ),
    Claim(
        "softmax-entries",
        "Without softmax the entries of query and value block are of the same size.",
        f"{PAPER}, Section 4.1 and Figure 4",
    ),
    Claim(
        "softmax-query",
        "Softmax changes the size of the query block's entries, not of the value block's.",
        f"{PAPER}, Section 4.1 and Figure 4",
    ),
    Claim(
        "softmax-indefinite",
        "Softmax makes the diagonal blocks indefinite; without it they are positive semi-definite.",
        f"{PAPER}, Section 4.1",
    ),
    Claim(
        "table-1",
        "Linear attention's outer part is of the order Σ³ and its functional part ΩΣ, with Σ = XᵀX/L and Ω = Xᵀ(F − "
        "Y)/L; those of an MLP are of the orders Σ and Ω.",
        f"{PAPER}, Table 1",
    ),
    Claim(
        "depth-linear",
        "The blocks of D layers of linear attention grow with σ^(2·3^D): the last layer's for any σ, the others' for "
        "large σ.",
        f"{PAPER}, Section 4.1 and Figure 7",
    ),
    Claim("depth-mlp", "The diagonal blocks of a linear MLP grow with σ² at any depth.", f"{PAPER}, Figure 8"),
    Claim("cnn", "A linear CNN depends on its data as a linear MLP does.", f"{PAPER}, Table 1"),
    Claim(
        "deep-same",
        "In a deep Transformer each layer's blocks grow as those of a single layer for σ in (0, 1).",
        f"{PAPER}, Appendix G and Figure 6",
    ),
    Claim("deep-lower", "Earlier layers have smaller blocks for σ < 1.", f"{PAPER}, Appendix G"),
    Claim("deep-beyond", "For σ > 1 deeper networks show higher powers of σ.", f"{PAPER}, Appendix G"),
    Claim(
        "deep-top",
        "The top layer's query block and the outer part of its value block follow the prediction for a single layer "
        "quite closely beyond σ = 1 too, also in deeper networks.",
        f"{PAPER}, Appendix G",
    ),
    Claim(
        "deep-value-functional",
        "Below the top layer the functional part of the value block is not zero.",
        f"{PAPER}, Appendix G",
    ),
    Claim(
        "temperature",
        "A temperature t scales the T-outer part with 1/t² and the T-functional part with 1/t, so that the latter "
        "dominates for large t, the former for t → 0.",
        f"{PAPER}, Section 4.3",
    ),
    Claim(
        "single-matrix",
        "With one matrix in the place of W_Q W_Kᵀ the Hessian is that of the T-outer part, and the T-functional "
        "part is gone.",
        f"{PAPER}, Lemma 4.1",
    ),
    Claim(
        "t-pairs",
        "The eigenvalues of the T-functional part come in pairs ± of multiplicity d_K.",
        f"{PAPER}, Remark D.1",
    ),
    Claim(
        "t-rank",
        "The rank of the T-outer part is at most 2 d_K d − d_K² for d_K < d, and d² otherwise.",
        f"{PAPER}, Lemma D.2",
    ),
    Claim(
        "t-bulk",
        "The T-functional part is responsible for the bulk eigenvalues of the query-key Hessian.",
        f"{PAPER}, Appendix D",
    ),
    Claim(
        "heads",
        "Between heads the functional part is zero, and with more heads the outer part dominates the Hessian.",
        f"{PAPER}, Appendix E",
    ),
    Claim(
        "low-rank-value",
        "The blocks of a value of low rank are those of a linear MLP of two layers: hollow in the functional part.",
        f"{PAPER}, Appendix E.1",
    ),
    Claim(
        "low-rank-moment",
        "With a value W_O W_U of low rank and square loss the functional part of (W_O, W_U) depends quadratically on "
        "the first moment M1, and the outer part quadratically on M1 and on the value matrices.",
        f"{PAPER}, Appendix E.1",
    ),
    Claim(
        "one-rate",
        "Parameters of one homogeneous block on the diagonal of the Hessian need a single adaptive learning rate.",
        f"{PAPER}, Section 5",
    ),
    Claim(
        "scalar-bulk",
        "The Hessian of scalar attention has d_K − 1 pairs of bulk eigenvalues, symmetric about zero, and three "
        "outliers.",
        f"{SLIDES}, closed-form spectrum",
    ),
    Claim(
        "scalar-condition",
        "The condition number is sensitive to the norms of the query and key weights.",
        f"{SLIDES}, closed-form spectrum",
    ),
    Claim(
        "ggn-top",
        "The Gauss–Newton matrix approximates the largest eigenvalue worse for attention than for an MLP.",
        f"{SLIDES}, closed-form spectrum",
    ),
    Claim(
        "outlier-activations",
        "The Hessian spectrum is sensitive to outlier activations.",
        f"{SLIDES}, closed-form spectrum",
    ),
    Claim(
        "sink-scalar",
        "A larger attention sink shrinks the bulk and grows the outliers.",
        f"{SLIDES}, outliers in activations and the spectrum",
    ),
    Claim(
        "sink-gpt",
        "In a GPT larger attention sinks stretch the spectrum.",
        f"{SLIDES}, outliers in activations and the spectrum",
    ),
    Claim("loss-falls", "The loss falls for a learning rate in (0, 2/λ_max).", f"{SLIDES}, optimisation"),
    Claim(
        "norm-bounded", "LayerNorm keeps the input-dependent terms of the Hessian bounded.", f"{ARTICLE}, Section 5.4"
    ),
    Claim(
        "diagonal",
        "The Hessian of a block is dominated by its diagonal blocks: feed-forward part and attention have relatively "
        "independent curvature.",
        f"{ARTICLE}, Section 5.2",
    ),
    Claim(
        "diagonal-network",
        "The same of a whole network: its Hessian is dominated by the diagonal blocks of layers, embeddings, norm and "
        "unembedding.",
        f"{ARTICLE}, Section 5.2, read of a network",
    ),
    Claim("zero-blocks", "Residual connections make many blocks of the Hessian zero.", f"{ARTICLE}, Section 5.2"),
    Claim("norm-couples", "Layers are coupled through LayerNorm.", f"{ARTICLE}, Section 5.2"),
    Claim(
        "softmax-couples",
        "The softmax Jacobian couples the tokens of a sequence, depending on the data.",
        f"{ARTICLE}, Section 5.4",
    ),
    Claim(
        "relu-simple",
        "ReLU's vanishing second derivative keeps the feed-forward Hessian simple: its functional part is hollow.",
        f"{ARTICLE}, Section 5.4",
    ),
    Claim(
        "bound",
        "The spectral norm of the attention Hessian is bounded by norms of tokens, weights and residual, in the way of "
        "Theorem 1.",
        f"{SECOND}, Theorem 1",
    ),
    Claim(
        "depth-growth",
        "The norm of the Hessian grows with depth, and Pre-LN is the remedy.",
        f"{ARTICLE}, Section 6.4",
    ),
    Claim(
        "training-phases",
        "Curvature changes fast at the beginning of training and settles later.",
        f"{ARTICLE}, Section 7.2",
    ),
    Claim(
        "critical-batch",
        "The Hessian explains the critical batch size, by its spectrum and by tr(HΣ)/gᵀHg.",
        f"{ARTICLE}, Section 7.2; {NOISE_SCALE}, Section 2",
    ),
    Claim(
        "critical-batch-simple",
        "The simple noise scale tr Σ/‖g‖² predicts the critical batch size.",
        f"{NOISE_SCALE}, abstract",
    ),
    Claim(
        "convergence-rate",
        "The spectrum of the Hessian predicts the rate of convergence: δw ← (I − ηH) δw in each step.",
        f"{ARTICLE}, Sections 8.2 and 8.3",
    ),
    Claim(
        "conditioning-speed",
        "The condition number of the Hessian affects the speed of convergence.",
        f"{ARTICLE}, Section 1.2",
    ),
    Claim(
        "convergence",
        "The loss landscape converges with the size of the data set, at the rate 1/k.",
        f"{SECOND}, abstract",
    ),
    Claim(
        "second-order",
        "Of the Taylor expansion of what more data change in the loss, the quadratic term dominates.",
        f"{ARTICLE}, Section 8.3",
    ),
    Claim("conditioning-data", "Larger data sets give better conditioned Hessians.", f"{ARTICLE}, Section 7.2"),
    Claim("spectrum-size", "Larger models have wider Hessian spectra.", f"{ARTICLE}, Section 7.2"),
    Claim(
        "scaling-exponents",
        "Norm and condition number of the Hessian are proportional to 1/√D with the number of samples D.",
        f"{ARTICLE}, Sections 7.4 and 9.2",
    ),
    Claim(
        "scaling-explained",
        "The Hessian explains empirical scaling laws, as it connects the size of the data set to the smoothness of the "
        "loss landscape: read as curvature that helps to predict the loss.",
        f"{ARTICLE}, Sections 7.3 and 11.1",
    ),
    Claim(
        "critical-rate",
        "The critical learning rate of gradient descent, beyond which a step no longer lowers the loss, is 2/λ_max.",
        f"{ARTICLE}, Section 8.3",
    ),
    Claim(
        "advice-adaptive",
        "Where early layers have a high condition number, an adaptive optimiser (Adam, AdaGrad) is to be used: it gets "
        "farther in as many steps.",
        f"{ARTICLE}, Section 6.4",
    ),
    Claim(
        "advice-momentum",
        "Where there are negative eigenvalues, gradient clipping and momentum are to be used: they get farther in as "
        "many steps.",
        f"{ARTICLE}, Section 6.4",
    ),
    Claim(
        "advice-layerwise",
        "Where curvature varies across layers, each layer is to have its own learning rate, the inverse of its "
        "curvature: it gets farther in as many steps.",
        f"{ARTICLE}, Section 6.4",
    ),
    Claim(
        "quadratic-course",
        "Training follows the quadratic model, δw_{t+1} ≈ (I − ηH) δw_t.",
        f"{ARTICLE}, Section 8.2",
    ),
    Claim(
        "edge-steps",
        "The edge of stability is 2/η for gradient descent, 2(1+β)/η with momentum and 2(1+β₁)/((1−β₁)η) for Adam with "
        "its preconditioner held: just below a displacement along the top eigenvector shrinks, just above it grows.",
        f"{ADAM_EDGE} and {GD_EDGE}",
    ),
    Claim(
        "adam-edge",
        "Full-batch training with Adam takes place at the adaptive edge of stability: the preconditioned sharpness "
        "rises to 2(1+β₁)/((1−β₁)η), 38/η at the usual β₁, and hovers about it.",
        ADAM_EDGE,
    ),
    Claim(
        "gd-edge",
        "Full-batch training with gradient descent takes place at the edge of stability: the sharpness rises to 2/η "
        "and hovers about it.",
        GD_EDGE,
    ),
    Claim(
        "block-order",
        "The mean curvature per parameter is ordered by role: Emb ≪ QK < FFN < VO ≪ Norm.",
        BLOCK_ORDER,
    ),
    Claim(
        "block-heterogeneity",
        "The spectra of the Hessian's blocks differ more from one another in a Transformer than in a convolutional "
        "network.",
        HETEROGENEITY,
    ),
    Claim(
        "ggn-top-training",
        "While a network learns, the outlying eigenvalues of the Hessian are those of its Gauss–Newton part: read of "
        "the largest one in a Transformer.",
        OUTLIERS,
    ),
)
