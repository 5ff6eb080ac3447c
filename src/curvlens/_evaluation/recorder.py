"""Cuts a forward pass at the borders of its modules: the loss becomes a chain of segments, each of one module.

While a model runs under `Recorder`, every tensor that enters or leaves a module is replaced by a leaf. The computation
between two cuts is a segment: a function of earlier leaves and of parameters, computed by one module's own code. The
steps of scaled dot-product attention (scores, softmax, mix) are no modules, but are cut into segments too.

The module's own code continues with the original tensor, not with the leaf. If a later segment uses the original
tensor, the tensor is an input of that segment, as its leaf would be. Both have the same value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens.batches import is_namedtuple
from curvlens.sdpa import scaled_dot_product_attention
from curvlens.sdpa.mode import multi_head_attention
from curvlens.surroundings import as_written, within

STEPS = ("scores", "softmax", "mix")
"""The steps of scaled dot-product attention, in order."""


Edge = tuple[Any, int]
"""A node of autograd's graph, and the index of one of its outputs."""


@dataclass(eq=False)
class Segment:
    """The computation of one module between two cuts."""

    path: str
    """The path of the module. A step of attention adds its name to the path of the module that contains it."""
    outputs: list[Tensor]
    copies: list[Tensor]
    """Leaves that replace the outputs in everything that follows."""
    leaves: list[Tensor] = field(default_factory=list)
    """Parameters, and copies of earlier segments, on which the outputs depend."""
    inputs: list[Tensor] = field(default_factory=list)
    """For each leaf the tensor to differentiate with respect to: the leaf, or the tensor that it replaced."""

    above: set[int] = field(default_factory=set)
    """The identities of the inputs and of everything that these depend on."""

    def find_leaves(self, known: Mapping[int, Tensor], cuts: Mapping[Edge, Cut]) -> None:
        """Find the leaves that the outputs depend on. The search stops at earlier cuts where it can."""
        opened = set[Edge]()
        found = self._inputs(known, cuts, opened)
        # autograd passes through an input if another requested input lies behind it
        while shared := {
            edge for key, (_, _, edge) in found.items() if edge and cuts[edge].above & (found.keys() - {key})
        }:
            opened |= shared
            found = self._inputs(known, cuts, opened)
        self.leaves = [leaf for leaf, _, _ in found.values()]
        self.inputs = [x for _, x, _ in found.values()]
        self.above = set(found).union(*(cuts[edge].above for _, _, edge in found.values() if edge))

    def _inputs(
        self, known: Mapping[int, Tensor], cuts: Mapping[Edge, Cut], opened: Container[Edge]
    ) -> dict[int, tuple[Tensor, Tensor, Edge | None]]:
        """Leaves, the tensors they replaced and the edges of the cuts, by identity; cuts in ``opened`` are ignored."""
        found: dict[int, tuple[Tensor, Tensor, Edge | None]] = {}
        todo: list[Edge] = [(x.grad_fn, x.output_nr) for x in self.outputs]
        seen = set[Edge]()
        while todo:
            edge = todo.pop()
            if edge[0] is None or edge in seen:
                continue
            seen.add(edge)
            leaf = getattr(edge[0], "variable", None)
            if edge in cuts and edge not in opened:
                found[id(cuts[edge].original)] = (cuts[edge].leaf, cuts[edge].original, edge)
            elif leaf is None:
                todo.extend(edge[0].next_functions)
            elif id(leaf) in known:
                found[id(leaf)] = (leaf, leaf, None)
        return found


class Cut(NamedTuple):
    """A tensor at which the pass was cut."""

    original: Tensor
    leaf: Tensor
    """The leaf that replaces it."""
    above: set[int]
    """The identities of what it depends on."""


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
        """``writable``: hand out tensors that may be written into; ``whole``: paths whose inputs are not cut."""
        self.segments: list[Segment] = []
        self.kinds: dict[str, str] = {}
        """By path: the class of the module, or the step of attention."""
        self._model = model
        self._known = {id(p): p for p in parameters.values()}
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._taken = {path for paths in self._paths.values() for path in paths}
        self._stack: list[tuple[int, str]] = []
        self._writable, self._whole = writable, whole
        self._given: list[list[tuple[Tensor, int]]] = []
        self.results: dict[str, list[Tensor | None]] = {}
        """For each call of a module the leaf of the first tensor that it returned; None if there is none."""
        self._versions: list[tuple[Tensor, int]] = []
        self._behind: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Tensors that were handed out, by identity: the tensor, its leaf, and its version."""
        self._cuts: dict[Edge, Cut] = {}
        self.writers: set[str] = set()
        """Modules that wrote into their arguments."""
        self.hidden: dict[str, str] = {}
        """Modules that ran inside a transformation of torch.func, where no cut is possible, and their callers."""

    @property
    def here(self) -> str:
        """The path of the module whose code runs now; "" is the model itself and the code around it."""
        return self._stack[-1][1] if self._stack else ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Cut everything that the model computes inside."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules(remove_duplicate=False):
                self.kinds[path] = type(module).__name__
            for module in self._model.modules():
                entering = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(entering.remove)
                # called even if the module raises
                leaving = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                stack.callback(leaving.remove)
            stack.enter_context(_Attention(self))
            stack.enter_context(as_written())
            yield

    def finish(self, outputs: list[Tensor]) -> list[Tensor]:
        """Cut the outputs that the loss sees, and return their leaves."""
        self._writable = False
        ends: list[Tensor] = self.cut([self._leaf(x) for x in outputs], "")
        self.results[""] = [x if x.requires_grad else None for x in ends[:1]]
        return ends

    def _path(self, module: nn.Module) -> str:
        """The path of a module; if it has several, the one inside the calling module."""
        paths = self._paths.get(id(module), [self.here])
        inside = f"{self.here}." if self.here else ""
        return next((path for path in paths if path.startswith(inside)), paths[0])

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._path(module)
        if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors((args, kwargs))):
            self.hidden[path] = self.here
        elif path not in self._whole:
            args, kwargs = self.cut((args, kwargs), self.here)
        self._stack.append((id(module), path))
        self._given.append([(x, x._version) for x in tensors((args, kwargs))] if self._writable else [])
        return args, kwargs

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._stack or self._stack[-1][0] != id(module):
            return output  # an error was raised before the module was entered
        _, path = self._stack.pop()
        if any(x._version != before for x, before in self._given.pop()):
            self.writers.add(path)
        if path == "" or path in self.hidden:
            return output
        self.cut(written_to((*args, *kwargs.values())), path)
        output = self.cut(output, path)
        found = [self._behind[id(x)][1] if id(x) in self._behind else x for x in tensors(output)]
        self.results.setdefault(path, []).append(next((x for x in found if id(x) in self._known), None))
        return output

    def cut(self, tree: Any, path: str) -> Any:
        """The tree with its computed tensors replaced by leaves; one segment for all of them."""
        segment, seen, handed = Segment(path, [], []), list[Tensor](), list[Tensor]()

        def one(x: Tensor) -> Tensor:
            if x.grad_fn is None or not (x.is_floating_point() or x.is_complex()):
                return x
            for before, copied in zip(seen, handed, strict=True):
                if before is x:
                    return copied
            if self._leaf(x) is not x:
                return x
            edge = (x.grad_fn, x.output_nr)
            if edge in self._cuts and not x.is_complex():
                return self._cuts[edge].leaf
            with torch.enable_grad():
                real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
                computed = real.clone() if self._writable else real  # a later write into x must not change this output
                leaf = computed.detach().requires_grad_()
                copied = torch.view_as_complex(leaf) if x.is_complex() else leaf
                copied = copied.clone() if self._writable else copied
            seen.append(x)
            self._versions.append((computed, computed._version))
            segment.outputs.append(computed)
            segment.copies.append(leaf)
            handed.append(copied)
            self._behind[id(copied)] = (copied, leaf, copied._version)
            return copied

        result = mapped(one, tree)
        if segment.outputs:
            self._add(segment)
        return result

    def _leaf(self, x: Tensor) -> Tensor:
        """The leaf of a tensor that was handed out, unless it was written into; then the tensor itself."""
        _, leaf, version = self._behind.get(id(x), (None, x, -1))
        return leaf if version == x._version else x

    @property
    def written(self) -> bool:
        """Whether a tensor was written into after it was cut: it no longer equals the segment's output."""
        return any(x._version != before for x, before in self._versions)

    def _add(self, segment: Segment) -> None:
        segment.find_leaves(self._known, self._cuts)
        self._known.update((id(leaf), leaf) for leaf in segment.copies)
        if not self._writable:
            for x, leaf in zip(segment.outputs, segment.copies, strict=True):
                self._cuts[x.grad_fn, x.output_nr] = Cut(x, leaf, segment.above)
        self.segments.append(segment)

    def step(self, name: str, x: Tensor) -> Tensor:
        """Cut the result of a step of attention."""
        path = f"{self.here}.{name}" if self.here else name
        path = f"{path}()" if path in self._taken else path  # the model has a module of that name
        self.kinds[path] = name
        cut: Tensor = self.cut(x, path)
        return cut


class _Attention(TorchFunctionMode):
    """Replaces scaled dot-product attention by its three steps."""

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
            return within([self], lambda: multi_head_attention(*args, **kwargs))
        return func(*args, **kwargs)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a module's arguments or results."""
    found: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(one, tree)
    return found


def written_to(tree: Any) -> list[Any]:
    """The containers among a module's arguments; the module may have stored results in them."""
    if isinstance(tree, tuple):
        return [found for value in tree for found in written_to(value)]
    kept = isinstance(tree, (list, dict)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))
    return [tree] if kept else []


def mapped(function: Callable[[Tensor], Tensor], tree: Any, inside: tuple[int, ...] = ()) -> Any:
    """Apply ``function`` to every tensor of a module's arguments or results.

    Lists, dicts and dataclasses are changed in place, so others that refer to them see the new tensors. Only tuples
    are replaced.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if id(tree) in inside:  # the container contains itself
        return tree
    inside = (*inside, id(tree))
    if isinstance(tree, dict):
        for key, value in list(tree.items()):
            if (new := mapped(function, value, inside)) is not value:
                tree[key] = new
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            if (new := mapped(function, value, inside)) is not value:
                tree[i] = new
    elif isinstance(tree, tuple):  # also the named result of torch.max
        values = [mapped(function, value, inside) for value in tree]
        if any(new is not old for new, old in zip(values, tree, strict=True)):
            return type(tree)(*values) if is_namedtuple(tree) else type(tree)(values)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for part in dataclasses.fields(tree):
            value = getattr(tree, part.name, None)
            if (new := mapped(function, value, inside)) is not value:
                object.__setattr__(tree, part.name, new)
    return tree
