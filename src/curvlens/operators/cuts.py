"""A forward pass cut at the borders of its modules: the loss as a chain of segments, each of one module.

While a model runs under `Recorder`, every tensor that enters or leaves a module is replaced by a leaf that stands for
it. What lies between two cuts is a segment: a function of earlier leaves and of parameters, computed by one module's
own code. So are the steps of scaled dot-product attention, which are no modules: scores, softmax and mix.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens.batches import is_namedtuple
from curvlens.checks import graph_nodes
from curvlens.sdpa.mode import multi_head_attention
from curvlens.sdpa.reference import scaled_dot_product_attention

STEPS = ("scores", "softmax", "mix")
"""Of scaled dot-product attention, in their order."""


@dataclass(eq=False)
class Segment:
    """What one module computed between two cuts."""

    path: str
    """Of the module; for a step of attention the path of the module in which it is, and the step."""
    outputs: list[Tensor]
    copies: list[Tensor]
    """Leaves that stand for the outputs in all that follows."""
    leaves: list[Tensor] = field(default_factory=list)
    """Copies of earlier segments and parameters, on which the outputs depend."""

    def find_leaves(self, known: Mapping[int, Tensor]) -> None:
        """Look for what the outputs depend on."""
        found = {id(node.variable): node.variable for node in graph_nodes(self.outputs) if hasattr(node, "variable")}
        self.leaves = [leaf for key, leaf in found.items() if key in known]


class Recorder:
    """Cuts a forward pass and keeps its segments, in the order in which they were computed."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        *,
        writable: bool = False,
        whole: Container[str] = (),
    ) -> None:
        """``writable``: hand out tensors that may be written to; ``whole``: paths whose inputs are left as they are."""
        self.segments: list[Segment] = []
        self.kinds: dict[str, str] = {}
        """What a path is: the class of its module, or a step of attention."""
        self._model = model
        self._known = {id(p): p for p in parameters.values()}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._taken = set(self._paths.values())
        self._stack: list[str] = []
        self._writable, self._whole = writable, whole
        self._given: list[list[tuple[Tensor, int]]] = []
        self.results: dict[str, list[Tensor | None]] = {}
        """What each call of a module gave: the leaf that stands for the first tensor of it; None if there is none."""
        self._versions: list[tuple[Tensor, int]] = []
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}
        self.writers: set[str] = set()
        """Modules that wrote into what they were given."""

    @property
    def here(self) -> str:
        """The path of the module whose code runs now; "" is the model itself, and what is around it."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Cut whatever the model does in here."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                self.kinds[path] = type(module).__name__
                entering = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(entering.remove)
                leaving = module.register_forward_hook(self._leave, always_call=True)  # also if it raises
                stack.callback(leaving.remove)
            stack.enter_context(_Attention(self))
            yield

    def finish(self, outputs: list[Tensor]) -> list[Tensor]:
        """Cut what the loss sees, too: the leaves that stand for it."""
        self._writable = False
        ends: list[Tensor] = self.cut(outputs, "")
        return ends

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths.get(id(module), self.here)
        if path not in self._whole:
            args, kwargs = self.cut((args, kwargs), self.here)
        self._stack.append(path)
        self._given.append([(x, x._version) for x in tensors((args, kwargs))] if self._writable else [])
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        path = self._stack.pop()
        if any(x._version != before for x, before in self._given.pop()):
            self.writers.add(path)
        output = output if path == "" else self.cut(output, path)
        found = [self._behind[id(x)][1] if id(x) in self._behind else x for x in tensors(output)]
        self.results.setdefault(path, []).append(next((x for x in found if id(x) in self._known), None))
        return output

    def cut(self, tree: Any, path: str) -> Any:
        """The tree with leaves in the place of tensors that something computed; one segment for all of them."""
        segment, seen, handed = Segment(path, [], []), list[Tensor](), list[Tensor]()

        def one(x: Tensor) -> Tensor:
            if x.grad_fn is None or not x.is_floating_point():
                return x
            for before, copied in zip(seen, handed, strict=True):
                if before is x:
                    return copied
            computed = x.clone() if self._writable else x  # what is written into x later is another output
            leaf = computed.detach().requires_grad_()
            seen.append(x)
            self._versions.append((computed, computed._version))
            segment.outputs.append(computed)
            segment.copies.append(leaf)
            handed.append(leaf.clone() if self._writable else leaf)
            self._behind[id(handed[-1])] = (handed[-1], leaf)
            return handed[-1]

        result = mapped(one, tree)
        if segment.outputs:
            self._add(segment)
        return result

    @property
    def written(self) -> bool:
        """Whether something was written into after it was cut: then it is no longer what the segment gave."""
        return any(x._version != before for x, before in self._versions)

    def _add(self, segment: Segment) -> None:
        segment.find_leaves(self._known)
        self._known.update((id(leaf), leaf) for leaf in segment.copies)
        self.segments.append(segment)

    def step(self, name: str, x: Tensor) -> Tensor:
        """What a step of attention gave, cut."""
        path = f"{self.here}.{name}" if self.here else name
        path = f"{path}()" if path in self._taken else path  # a module of that name is another
        self.kinds[path] = name
        cut: Tensor = self.cut(x, path)
        return cut


class _Attention(TorchFunctionMode):
    """Scaled dot-product attention in its three steps."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = self._recorder.cut((args, kwargs), self._recorder.here)
            return scaled_dot_product_attention(*args, **kwargs, after=self._recorder.step)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        return func(*args, **kwargs)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of what a module takes or gives."""
    found: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(one, tree)
    return found


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply ``function`` to every tensor of what a module takes or gives; containers keep their type."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        if type(tree) is dict:
            return {key: mapped(function, value) for key, value in tree.items()}
        other = copy.copy(tree)  # as the outputs of Hugging Face models
        for key, value in tree.items():
            other[key] = mapped(function, value)
        return other
    if is_namedtuple(tree):
        return type(tree)(*(mapped(function, value) for value in tree))
    if isinstance(tree, tuple):  # also what torch.max gives
        return type(tree)([mapped(function, value) for value in tree])
    if isinstance(tree, list):
        values = [mapped(function, value) for value in tree]
        if type(tree) is list:
            return values
        listed = copy.copy(tree)
        listed[:] = values
        return listed
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for part in dataclasses.fields(tree):
            if hasattr(tree, part.name):
                object.__setattr__(made, part.name, mapped(function, getattr(tree, part.name)))
        return made
    return tree
