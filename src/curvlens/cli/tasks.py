"""Which loss a Hugging Face model has: the task that its architecture is named after, or what ``--loss`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from curvlens.cli.defaults import LossName
from curvlens.cli.models import transformers_library
from curvlens.errors import CurvlensError, nearest
from curvlens.losses import CausalLM, CrossEntropy, Loss, MaskedLM

Kind = Literal["causal-lm", "seq2seq-lm", "masked-lm", "classification", "token-classification"]

OWN = "Write a function that returns (model, data, loss), and give file.py:function."


@dataclass(frozen=True)
class _Known:
    """A task: the class that loads it, transformers' table of its models, the end of their names, and its loss."""

    auto: str
    table: str
    endings: tuple[str, ...]
    words: str


_KNOWN: Mapping[Kind, _Known] = {
    "token-classification": _Known(
        "AutoModelForTokenClassification",
        "TOKEN_CLASSIFICATION",
        ("ForTokenClassification",),
        "cross-entropy of the labels of words",
    ),
    "classification": _Known(
        "AutoModelForSequenceClassification",
        "SEQUENCE_CLASSIFICATION",
        ("ForSequenceClassification",),
        "cross-entropy of the labels of texts",
    ),
    "seq2seq-lm": _Known(
        "AutoModelForSeq2SeqLM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        ("ForConditionalGeneration", "ForSeq2SeqLM"),
        "cross-entropy of the target's tokens, given the input and the tokens before",
    ),
    "masked-lm": _Known(
        "AutoModelForMaskedLM", "MASKED_LM", ("ForMaskedLM",), "cross-entropy of 15 % of the tokens, which are masked"
    ),
    "causal-lm": _Known(
        "AutoModelForCausalLM", "CAUSAL_LM", ("ForCausalLM", "LMHeadModel"), "cross-entropy of the next token"
    ),
}


@dataclass(frozen=True)
class Task:
    """The task of a model, and why it is this one."""

    kind: Kind
    because: str
    architecture: str

    @property
    def auto(self) -> str:
        """The class of transformers that loads such a model."""
        return _KNOWN[self.kind].auto

    @property
    def sentence(self) -> str:
        """Which loss it is and why, for the user."""
        return f"Loss: {_KNOWN[self.kind].words} ({self.kind}), because {self.because}."

    def loss(self) -> Loss:
        """The loss; equal to what the model computes from ``labels=``."""
        if self.kind in ("causal-lm", "seq2seq-lm"):
            return CausalLM()
        return MaskedLM() if self.kind == "masked-lm" else CrossEntropy()


def choose(config: Mapping[str, Any], asked: LossName | None, target: str) -> Task:
    """The task of a model by its config.json, or by ``--loss``."""
    if asked is not None and asked not in _LOSSES:
        raise CurvlensError(f"There is no loss {asked!r}. {nearest(asked, _LOSSES)}")
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    own = _own_task(architecture)
    kind = own or _by_type(config)
    because = f"config.json names {architecture}" if own else "the weights have such a head"
    if asked is not None:
        same = {"causal-lm": "seq2seq-lm", "classification": "token-classification"}
        kind, because = own if own == same.get(asked) else asked, f"--loss {asked} was given"
    if kind is None or (own is None and asked is None and _other_head(architecture)):
        raise CurvlensError(
            f"{target!r} is {architecture or 'a model without architectures in its config.json'}, and no loss is known "
            f"for it. Give --loss causal-lm, masked-lm or classification if it has such a head. Otherwise: {OWN}"
        )
    _require_causal(config, kind, target, architecture)
    _require_classes(config, kind, target)
    return Task(kind, because, architecture)


_LOSSES = ("causal-lm", "masked-lm", "classification")


def _own_task(architecture: str) -> Kind | None:
    """The task that an architecture is named after; None for bare models and for other heads."""
    tables = transformers_library().models.auto.modeling_auto
    for kind, known in _KNOWN.items():
        if architecture in getattr(tables, f"MODEL_FOR_{known.table}_MAPPING_NAMES").values():
            return kind
    if hasattr(transformers_library(), architecture):
        return None
    # custom code: its name is all there is
    return next((kind for kind, known in _KNOWN.items() if architecture.endswith(known.endings)), None)


def _other_head(architecture: str) -> bool:
    """Whether a model has a head of another task, such as images or questions."""
    return "For" in architecture and not architecture.endswith("ForPreTraining")


def _by_type(config: Mapping[str, Any]) -> Kind | None:
    """The language model of a type, for folders of bare models; whether they have its head is seen in loading."""
    tables = transformers_library().models.auto.modeling_auto
    kinds: list[Kind] = ["seq2seq-lm"] if config.get("is_encoder_decoder") else ["masked-lm", "causal-lm"]
    if config.get("is_decoder"):
        kinds = ["causal-lm"]
    for kind in kinds:
        if config.get("model_type") in getattr(tables, f"MODEL_FOR_{_KNOWN[kind].table}_MAPPING_NAMES"):
            return kind
    return None


def _require_causal(config: Mapping[str, Any], kind: Kind, target: str, architecture: str) -> None:
    """An encoder sees the next token: that it predicts it would mean nothing."""
    masked = transformers_library().models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if kind == "causal-lm" and config.get("model_type") in masked and not config.get("is_decoder"):
        raise CurvlensError(
            f"{target!r} is {architecture or config.get('model_type')} with is_decoder false: it sees the tokens that "
            "the loss causal-lm asks it for. Use --loss masked-lm, or save it with config.is_decoder = True."
        )


def _require_classes(config: Mapping[str, Any], kind: Kind, target: str) -> None:
    """A classifier of one of several classes; regressions and several labels at once have other losses."""
    if kind not in ("classification", "token-classification"):
        return
    problem, names = config.get("problem_type"), config.get("id2label")
    single = names is not None and len(names) == 1
    if problem not in (None, "single_label_classification") or single:
        what = "one output" if single and problem is None else f"problem_type {problem!r}"
        raise CurvlensError(
            f"{target!r} has {what}, and cross-entropy is for one of several classes. {OWN} For a regression the loss "
            "is cl.losses.MSE()."
        )
