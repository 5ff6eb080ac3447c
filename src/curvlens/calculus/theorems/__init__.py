"""The papers' statements for small sizes, to read beside the papers.

They follow the print literally and are corrected where it is wrong. A formula that is missing in our copy is derived
anew (`theorem_1`). The docstrings say which.

Functions have the numbers of the papers: lemma_1 and theorem_1 to theorem_4 belong to the paper on the full block, all
others to the one on self-attention. A function for an identity returns its two sides; one for a derivative returns a
Jacobian or a dict of blocks. For any real size use the structured forms (`curvlens.calculus.attention`), which equal
these.
"""

from curvlens.calculus.theorems.identities import (
    equation_9,
    equation_10,
    equation_11,
    equation_12,
    equation_13,
    equation_14,
    equation_15,
    equation_16,
    equation_17,
    equation_18,
    lemma_b_2,
    lemma_b_3,
    lemma_d_1,
)
from curvlens.calculus.theorems.self_attention import (
    lemma_4_1,
    lemma_b_1,
    lemma_c_1,
    lemma_d_2,
    remark_3_1,
    remark_4_1,
    remark_c_1,
    remark_d_1,
    remark_e_1,
    theorem_3_1,
    theorem_3_2,
)
from curvlens.calculus.theorems.transformer import lemma_1, theorem_1, theorem_2, theorem_3, theorem_4

__all__ = [
    "equation_9",
    "equation_10",
    "equation_11",
    "equation_12",
    "equation_13",
    "equation_14",
    "equation_15",
    "equation_16",
    "equation_17",
    "equation_18",
    "lemma_1",
    "lemma_4_1",
    "lemma_b_1",
    "lemma_b_2",
    "lemma_b_3",
    "lemma_c_1",
    "lemma_d_1",
    "lemma_d_2",
    "remark_3_1",
    "remark_4_1",
    "remark_c_1",
    "remark_d_1",
    "remark_e_1",
    "theorem_1",
    "theorem_2",
    "theorem_3",
    "theorem_3_1",
    "theorem_3_2",
    "theorem_4",
]
