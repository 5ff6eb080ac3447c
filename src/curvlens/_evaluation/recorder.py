"""A forward pass cut at the borders of its modules: the loss as a chain of segments, each of one module.

While a model runs under `Recorder`, every tensor that enters or leaves a module is replaced by a leaf that stands for
it. What lies between two cuts is a segment: a function of earlier leaves and of parameters, computed by one module's
own code. So are the steps of scaled dot-product attention, which are no modules: scores, softmax and mix.

The module's own code goes on with the tensor that was cut, not with the leaf. Where a later segment comes back to it,
it is an input like a leaf, and stands for the same number.
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
"""Of scaled dot-product attention, in their order."""


Edge = tuple[Any, int]
"""A node of autograd's graph, and which of its results."""


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
    inputs: list[Tensor] = field(default_factory=list)
    """By which the outputs are differentiated for them: a leaf itself, or the tensor that it stands for."""

    above: set[int] = field(default_factory=set)
    """The inputs by identity, and all that these depend on."""

    def find_leaves(self, known: Mapping[int, Tensor], cuts: Mapping[Edge, Cut]) -> None:
        """Look for what the outputs depend on: not beyond what was cut before, where that is all they come back to."""
        opened = set[Edge]()
        found = self._inputs(known, cuts, opened)
        # autograd goes through an input if it is asked for another one behind it
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
        """Leaves, what they stand for and where it was cut, by its identity; ``opened`` is looked through."""
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
    """A tensor that was cut."""

    original: Tensor
    leaf: Tensor
    """What stands for it."""
    above: set[int]
    """What it depends on."""


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
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._taken = {path for paths in self._paths.values() for path in paths}
        self._stack: list[tuple[int, str]] = []
        self._writable, self._whole = writable, whole
        self._given: list[list[tuple[Tensor, int]]] = []
        self.results: dict[str, list[Tensor | None]] = {}
        """What each call of a module gave: the leaf that stands for the first tensor of it; None if there is none."""
        self._versions: list[tuple[Tensor, int]] = []
        self._behind: dict[int, tuple[Tensor, Tensor, int]] = {}
        """What was handed out, by identity: itself, the leaf behind it, and its version."""
        self._cuts: dict[Edge, Cut] = {}
        self.writers: set[str] = set()
        """Modules that wrote into what they were given."""
        self.hidden: dict[str, str] = {}
        """Modules that ran inside a transformation of torch.func, where nothing can be cut, and by whom called."""

    @property
    def here(self) -> str:
        """The path of the module whose code runs now; "" is the model itself, and what is around it."""
        return self._stack[-1][1] if self._stack else ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Cut whatever the model does in here."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules(remove_duplicate=False):
                self.kinds[path] = type(module).__name__
            for module in self._model.modules():
                entering = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(entering.remove)
                # also if it raises
                leaving = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                stack.callback(leaving.remove)
            stack.enter_context(_Attention(self))
            stack.enter_context(as_written())
            yield

    def finish(self, outputs: list[Tensor]) -> list[Tensor]:
        """Cut what the loss sees, too: the leaves that stand for it."""
        self._writable = False
        ends: list[Tensor] = self.cut([self._leaf(x) for x in outputs], "")
        self.results[""] = [x if x.requires_grad else None for x in ends[:1]]
        return ends

    def _path(self, module: nn.Module) -> str:
        """Of its paths, the one inside the module that calls it."""
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
            return output  # something raised before it was entered
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
        """The tree with leaves in the place of tensors that something computed; one segment for all of them."""
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
                computed = real.clone() if self._writable else real  # what is written into x later is another output
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
        """The leaf behind a tensor that was handed out, if that was not written into; else the tensor."""
        _, leaf, version = self._behind.get(id(x), (None, x, -1))
        return leaf if version == x._version else x

    @property
    def written(self) -> bool:
        """Whether something was written into after it was cut: then it is no longer what the segment gave."""
        return any(x._version != before for x, before in self._versions)

    def _add(self, segment: Segment) -> None:
        segment.find_leaves(self._known, self._cuts)
        self._known.update((id(leaf), leaf) for leaf in segment.copies)
        if not self._writable:
            for x, leaf in zip(segment.outputs, segment.copies, strict=True):
                self._cuts[x.grad_fn, x.output_nr] = Cut(x, leaf, segment.above)
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
            return within([self], lambda: multi_head_attention(*args, **kwargs))
        return func(*args, **kwargs)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of what a module takes or gives."""
    found: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(one, tree)
    return found


def written_to(tree: Any) -> list[Any]:
    """The containers among what a module was given, into which it may have put results."""
    if isinstance(tree, tuple):
        return [found for value in tree for found in written_to(value)]
    kept = isinstance(tree, (list, dict)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))
    return [tree] if kept else []


def mapped(function: Callable[[Tensor], Tensor], tree: Any, inside: tuple[int, ...] = ()) -> Any:
    """Apply ``function`` to every tensor of what a module takes or gives.

    Containers stay what they are: who else holds a list, a dict or a dataclass sees the new tensors in it. Only a tuple
    with another tensor is another tuple.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if id(tree) in inside:  # a container in itself
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
    elif isinstance(tree, tuple):  # also what torch.max gives
        values = [mapped(function, value, inside) for value in tree]
        if any(new is not old for new, old in zip(values, tree, strict=True)):
            return type(tree)(*values) if is_namedtuple(tree) else type(tree)(values)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for part in dataclasses.fields(tree):
            value = getattr(tree, part.name, None)
            if (new := mapped(function, value, inside)) is not value:
                object.__setattr__(tree, part.name, new)
    return tree
