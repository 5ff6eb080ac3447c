"""From what a user types to a model: a Hugging Face folder, name or type, or a function in a Python file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlens.errors import CurvlensError, a_kind, nearest
from curvlens.problem import Problem


def skeleton(target: str) -> nn.Module:
    """The model without its weights: names and shapes are all that a map of blocks needs."""
    if is_code(target):
        made = from_code(target)
        if isinstance(made, Problem):
            return made.model
        if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
            return made[0]  # (model, data, loss), as the doctor takes it
        if not isinstance(made, nn.Module):
            raise CurvlensError(
                f"{target} gave {a_kind(made)}, expected a torch.nn.Module, a curvlens.Problem or a tuple "
                "(model, data, loss)."
            )
        return made
    config = _config(target)
    with torch.device("meta"):
        model: nn.Module = _architecture(config)(config)
    return model


def with_weights(target: str) -> tuple[nn.Module, Any]:
    """A language model of Hugging Face with its weights, and its tokenizer; no code of the model's is run."""
    transformers = _transformers()
    other = "For other models write a function that returns (model, data, loss), and give file.py:function."
    try:
        place = _located(target)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CurvlensError(f"{target!r} could not be loaded as a language model: {_first(error)} {other}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except Exception as error:  # a folder without its files is a TypeError or a KeyError in some classes
        raise CurvlensError(f"{target!r} has no tokenizer that can be loaded: {_first(error)} {_TOKENIZER}") from error
    if not words:  # transformers makes up an empty one of the model's type
        raise CurvlensError(f"{target!r} has no tokenizer, or one that knows no word. {_TOKENIZER}")
    return model.eval(), tokenizer


def _located(target: str) -> str:
    """A folder, the name of a model if the hub answers, or the copy of it on this machine.

    The hub is asked once; transformers would try again and again for each file.
    """
    if Path(target).exists():
        return target
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.HfApi().model_info(target, timeout=10)
    except (hub.errors.HfHubHTTPError, ValueError):  # it answers: loading says what is wrong with the name
        return target
    except Exception as error:  # of whichever library carries the request
        try:
            return str(hub.snapshot_download(target, local_files_only=True))
        except hub.errors.LocalEntryNotFoundError:
            raise OSError("The hub cannot be reached, and there is no copy on this machine.") from error
    return target


_TOKENIZER = "Save it beside the model, tokenizer.save_pretrained(folder), or give file.py:function with the tokens."


def _first(error: Exception) -> str:
    """The first line of a message; its kind, if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_code(target: str) -> bool:
    """Whether ``file.py:name`` or ``package.module:name`` is meant; ``file.py`` alone lacks the name."""
    if target.endswith(".py"):
        raise CurvlensError(
            f"{target!r} is a file; which of its names is meant? Give {target}:name, as in {target}:make_model."
        )
    return ":" in target and not Path(target).exists()


def from_code(target: str) -> Any:
    """What ``package.module:name`` or ``file.py:name`` is, or returns if it is a function. This runs that code."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise CurvlensError(f"There is no file {place!r}. Expected file.py:name, as in train.py:make_model.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with _blamed(target):
            spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise CurvlensError(f"{error}. Expected package.module:name or file.py:name, got {target!r}.") from error
    if not hasattr(module, name):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        # what is its own before what it imports, which may be thousands
        own = {
            key
            for key, value in public.items()
            if isinstance(value, nn.Module) or getattr(value, "__module__", None) == module.__name__
        }
        known = sorted(public, key=lambda key: key not in own)
        raise CurvlensError(f"{place} has no {name!r}. {nearest(name, known)}")
    made = getattr(module, name)
    if isinstance(made, nn.Module) or not callable(made):
        return made
    needed = _needed(made)
    if needed:
        raise CurvlensError(
            f"{target} needs arguments ({', '.join(needed)}), and there is nothing to give it. Give the name of a "
            "function without arguments, as in def make(): return model, data, loss."
        )
    with _blamed(target):
        return made()


@contextmanager
def _blamed(target: str) -> Iterator[None]:
    """An error in a user's own code, with the place where it was raised."""
    try:
        yield
    except CurvlensError:
        raise
    except Exception as error:
        frames, file = traceback.extract_tb(error.__traceback__), target.rpartition(":")[0]
        own = [frame.lineno for frame in frames if frame.filename.endswith(file)]
        where = f"line {own[-1]}: " if own else ""
        raise CurvlensError(f"{target} raised {type(error).__name__}: {where}{_first(error)}") from error


def _needed(function: Any) -> list[str]:
    """The parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # not to be known: it is simply called
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in free]


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CurvlensError("Hugging Face models need transformers: pip install 'curvlens[hf]'.") from error


def _config(target: str) -> Any:
    """The configuration of a folder, of a model on the hub, or the default one of a type such as ``gpt2``."""
    transformers = _transformers()
    if not Path(target).exists() and target in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(target)
    try:
        return transformers.AutoConfig.from_pretrained(_located(target), trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = _first(error)
        raise CurvlensError(
            f"{target!r} is no folder with a config.json, no model type of transformers and no file.py:function. "
            f"{nearest(target, transformers.CONFIG_MAPPING)} {first}"
        ) from error


def _architecture(config: Any) -> Any:
    """The class that the configuration names; otherwise the one with a language-model head, or the bare model."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise CurvlensError(f"No model class is known for a {type(config).__name__}.")
