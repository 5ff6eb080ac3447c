"""Matrix-free operators: the Hessian, its Gauss–Newton and functional part, Fisher matrices."""

from curvlens.operators.activations import activation_hessian
from curvlens.operators.algebra import as_operator
from curvlens.operators.base import Operator
from curvlens.operators.closed_form import closed_form
from curvlens.operators.composition import diagonal
from curvlens.operators.fisher import empirical_fisher, fisher
from curvlens.operators.functional import functional
from curvlens.operators.ggn import ggn
from curvlens.operators.hessian import hessian
from curvlens.operators.modules import module_part

__all__ = [
    "Operator",
    "activation_hessian",
    "as_operator",
    "closed_form",
    "diagonal",
    "empirical_fisher",
    "fisher",
    "functional",
    "ggn",
    "hessian",
    "module_part",
]
