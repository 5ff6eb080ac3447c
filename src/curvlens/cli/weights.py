"""A Hugging Face model with its weights and its tokenizer: only safetensors, and no code of the folder unasked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from curvlens import files
from curvlens.cli.code import first_line
from curvlens.cli.defaults import Options
from curvlens.cli.models import located, transformers_library
from curvlens.cli.tasks import OWN, Task, choose
from curvlens.errors import CurvlensError, listing

LARGEST_CONFIG = 16 << 20
"""Bytes of a config.json."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its task, and its tokenizer if it has one."""

    model: nn.Module
    task: Task
    tokenizer: Any | None
    no_tokenizer: str = ""
    """Why there is no tokenizer."""


def load(options: Options) -> Loaded:
    """The model, its task and its tokenizer, from a folder or the hub."""
    target, trust = options.target, options.trust_remote_code
    transformers = transformers_library()
    _require_folder(target)
    try:
        place = located(target)
        config = transformers.PreTrainedConfig.get_config_dict(place)[0]
    except (OSError, ValueError) as error:
        raise CurvlensError(_unloadable(target, error)) from error
    if not trust:
        _require_no_code(target, config)
    task = choose(config, options.loss, target)
    with _quiet(transformers):
        model = _with_weights(transformers, place, target, task, trust)
        tokenizer, why = _tokenizer(transformers, place, trust)
    return Loaded(model.eval(), task, tokenizer, why)


def _unloadable(target: str, error: Exception) -> str:
    return f"{target!r} could not be loaded: {first_line(error)} {_MODELS}"


_MODELS = "Give a Hugging Face folder or name, file.py:function, or demo."


def _require_folder(target: str) -> None:
    """Of a folder: that it holds a model whose weights are safetensors."""
    folder = Path(target)
    if not folder.exists():
        if target.startswith((".", "/", "~")):
            raise CurvlensError(f"There is no folder {target!r}. {_MODELS}")
        return
    if not folder.is_dir():
        raise CurvlensError(f"{target!r} is a file, expected a folder with config.json and safetensors. {_MODELS}")
    if not (folder / "config.json").is_file():
        raise CurvlensError(
            f"{target!r} is no model folder: it has no config.json. Save one with model.save_pretrained(folder)."
        )
    config = _json(folder / "config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for ending in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{ending}"))
    if not pickled:
        raise CurvlensError(
            f"{target!r} has a config.json and no weights. Save both with model.save_pretrained(folder)."
        )
    name = str(next(iter(config.get("architectures") or ()), ""))
    kind = name if name.isidentifier() else "AutoModel"
    convert = f"from transformers import {kind} as M; M.from_pretrained({target!r}).save_pretrained({target!r})"
    raise CurvlensError(
        f"{target!r} has its weights as pickle only ({listing(pickled, 2)}). Loading pickle can run code, so curvlens "
        f"does not. If you trust the file, convert it:\npython -c {shlex.quote(convert)}"
    )


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = files.parse(files.read(file, LARGEST_CONFIG))
    except (OSError, ValueError) as error:
        raise CurvlensError(f"{str(file)!r} cannot be read: {first_line(error)}.") from error
    if not isinstance(found, dict):
        raise CurvlensError(f"{str(file)!r} is no configuration of a model: expected a JSON object.")
    return found


def _require_no_code(target: str, config: Mapping[str, Any]) -> None:
    """Custom code that transformers has no class for would have to be run."""
    own = config.get("auto_map")
    classes = [str(name).rpartition(".")[2] for name in own.values()] if isinstance(own, Mapping) else []
    missing = [name for name in classes if not hasattr(transformers_library(), name)]
    if missing:
        raise CurvlensError(
            f"{target!r} brings custom code ({listing(missing, 3)}), and curvlens runs no code of a model's folder "
            "unasked. Read it. If you trust it, add --trust-remote-code."
        )


def _with_weights(transformers: Any, place: str, target: str, task: Task, trust: bool) -> nn.Module:
    try:
        model, about = getattr(transformers, task.auto).from_pretrained(
            place, trust_remote_code=trust, use_safetensors=True, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # of damaged files, of unknown types, of custom code
        raise CurvlensError(_unloadable(target, error)) from error
    missing = sorted(about["missing_keys"])
    if missing:
        raise CurvlensError(
            f"{target!r} is {task.architecture or 'a model'}, and as {type(model).__name__} it lacks weights: "
            f"{listing(missing, 2)}. They would be random, and so would the curvature. Save a trained model with its "
            f"head, {type(model).__name__}.save_pretrained(folder). Or: {OWN}"
        )
    assert isinstance(model, nn.Module)
    return model


def _tokenizer(transformers: Any, place: str, trust: bool) -> tuple[Any | None, str]:
    """The tokenizer, or why there is none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=trust)
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except Exception as error:  # a folder without its files is a TypeError or a KeyError in some classes
        return None, f"it cannot be loaded: {first_line(error)}"
    if not words:  # transformers makes up an empty one of the model's type
        return None, "there are no files of one"
    return tokenizer, ""


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without bars and reports of transformers; what they say is in our messages."""
    log = transformers.utils.logging
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()
