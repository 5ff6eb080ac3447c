"""From what a user types to a model: a Hugging Face folder, name or type, or a function in a Python file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlens.cli.code import first_line, from_code, is_code
from curvlens.errors import CurvlensError, a_kind, nearest
from curvlens.problem import Problem


def skeleton(target: str) -> nn.Module | Problem:
    """The model without its weights: names and shapes are all that a map of blocks needs. Own code may give a Problem.

    A problem has a map already, with what it was told of parameters, blocks and heads.
    """
    if is_code(target):
        made = from_code(target)
        if isinstance(made, Problem):
            return made
        if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
            return made[0]  # (model, data, loss), as the doctor takes it
        if not isinstance(made, nn.Module):
            raise CurvlensError(
                f"{target} returned {a_kind(made)}, expected a torch.nn.Module, a curvlens.Problem or a tuple "
                "(model, data, loss)."
            )
        return made
    config = _config(target)
    with torch.device("meta"):
        model: nn.Module = _architecture(config)(config)
    return model


def located(target: str) -> str:
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
            raise OSError(
                "There is no such folder, the hub cannot be reached, and there is no copy on this machine."
            ) from error
    return target


def transformers_library() -> Any:
    """The library, which only Hugging Face models need."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CurvlensError("Hugging Face models need transformers: pip install 'curvlens[hf]'.") from error


def _config(target: str) -> Any:
    """The configuration of a folder, of a model on the hub, or the default one of a type such as ``gpt2``."""
    transformers = transformers_library()
    if not Path(target).exists() and target in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(target)
    try:
        return transformers.AutoConfig.from_pretrained(located(target), trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = first_line(error)
        raise CurvlensError(
            f"{target!r} is no folder with a config.json, no model type of transformers and no file.py:function. "
            f"{nearest(target, transformers.CONFIG_MAPPING)} {first}"
        ) from error


def _architecture(config: Any) -> Any:
    """The class that the configuration names; otherwise the one with a language-model head, or the bare model."""
    transformers = transformers_library()
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise CurvlensError(f"No model class is known for a {type(config).__name__}.")
