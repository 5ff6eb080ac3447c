"""From texts, lines and tokens to samples of a task: what the model reads, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from curvlens.cli import tokens as made
from curvlens.cli.defaults import SEQUENCES, TOKENS, Options
from curvlens.cli.records import Ids, Line, Lines, Text
from curvlens.cli.tokens import IGNORED, Sample
from curvlens.cli.weights import Loaded
from curvlens.errors import CurvlensError, a_kind, listing

UNLIMITED = 1 << 30
"""What a tokenizer says that knows no longest text."""
_STREAMS = ("causal-lm", "masked-lm", "seq2seq-lm")
"""The tasks for which a text is enough."""
_KEYS = {
    "causal-lm": '"text", or "input" and "target"',
    "seq2seq-lm": '"input" and "target"',
    "masked-lm": '"text"',
    "classification": '"text" and "label"',
    "token-classification": '"words" and "labels", two lists',
}


class Reader:
    """Makes samples for one model. ``tokens`` is the length of a sequence, at most."""

    def __init__(self, loaded: Loaded, options: Options) -> None:
        self.model, self.tokenizer, self.kind = loaded.model, loaded.tokenizer, loaded.task.kind
        self.config: Any = loaded.model.config
        self.target, self.no_tokenizer = options.target, loaded.no_tokenizer
        self.asked, self.sequences = options.tokens, options.sequences or SEQUENCES
        self.longest = self._longest()
        self.tokens = options.tokens or min(TOKENS, self.longest)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.notes: list[str] = []

    def batch(self, source: Text | Lines | Ids) -> tuple[dict[str, Tensor], str]:
        """A batch of what was read, and a sentence that says what it is."""
        self._require_fitting(source)
        samples = list(self._samples(source))
        answers = [label for each in samples if isinstance(each.labels, list) for label in each.labels if label >= 0]
        read = [token for each in samples for token in each.tokens]
        used = read + answers if self.kind == "seq2seq-lm" else read
        size = made.vocabulary(self.model)
        made.require_known(used, size, source.name, source.hint if isinstance(source, Ids) else "")
        if not samples:
            raise CurvlensError(f"{source.name} has no line with enough tokens. Expected {_KEYS[self.kind]}.")
        if self.kind == "masked-lm":
            samples = self._masked(samples, size, source.name)
        pad = made.padding(self.model, self.tokenizer, samples)
        if self.kind == "classification" and getattr(self.config, "pad_token_id", None) is None:
            self.config.pad_token_id = pad  # a decoder finds the end of a text by it
        lengths = [len(sample.tokens) for sample in samples]
        long = str(lengths[0]) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
        plural = "" if len(samples) == 1 else "s"
        sentence = f"Data: {len(samples)} sequence{plural} of {long} tokens from {source.name}."
        return made.batch(samples, pad), " ".join([sentence, *dict.fromkeys(self.notes)])

    def _longest(self) -> int:
        """How many tokens the model and its tokenizer take."""
        positions = getattr(self.config, "max_position_embeddings", None)
        known = [positions, getattr(self.tokenizer, "model_max_length", None)]
        longest = min([limit for limit in known if isinstance(limit, int) and limit > 1], default=UNLIMITED)
        if self.asked is not None and self.asked > longest:
            raise CurvlensError(
                f"--tokens {self.asked} is more than the {longest} tokens that {self.target!r} takes. Use --tokens "
                f"{longest} or less."
            )
        return longest

    def _require_fitting(self, source: Text | Lines | Ids) -> None:
        if self.tokenizer is None and not isinstance(source, Ids):
            raise CurvlensError(
                f"{self.target!r} has no tokenizer: {self.no_tokenizer}. Save it beside the model, "
                "tokenizer.save_pretrained(folder), or give tokens: --data tokens.npy, or .bin."
            )
        if self.kind == "masked-lm" and getattr(self.tokenizer, "mask_token_id", None) is None:
            raise CurvlensError(
                f"A masked language model needs the mask token of its tokenizer, and {self.target!r} has none. Save "
                "the tokenizer beside the model: tokenizer.save_pretrained(folder)."
            )
        if not isinstance(source, Lines) and self.kind not in _STREAMS:
            raise CurvlensError(
                f"{self.target!r} is a classifier, and {source.name} has no labels. Give JSONL, in each line "
                f"{_KEYS[self.kind]}: --data file.jsonl."
            )

    def _samples(self, source: Text | Lines | Ids) -> Iterator[Sample]:
        if isinstance(source, Lines):
            yield from self._of_lines(source)
            return
        for window in self._of_ids(source) if isinstance(source, Ids) else self._of_text(source):
            if self.kind == "seq2seq-lm":
                self.notes.append("Of each window the first half is the input, the second half the target.")
                half = len(window) // 2
                before, behind = self._ends() if self.tokenizer is not None else ([], [])
                yield Sample([*before, *window[:half], *behind], [*before, *window[half:], *behind])
            else:
                yield Sample(window, window)

    def _of_text(self, source: Text) -> list[list[int]]:
        """Windows of a text; those of an encoder have the special tokens around them."""
        before, behind = self._ends() if self.kind == "masked-lm" else ([], [])
        length = self.tokens - len(before) - len(behind)
        if length < 1:
            raise CurvlensError(
                f"--tokens {self.tokens} leaves no room beside the special tokens. Use --tokens {TOKENS}."
            )
        needed = length * self.sequences
        stream = self._beginning(source.words, needed)
        self._require_enough(source.name, len(stream), length)
        return [[*before, *window, *behind] for window in made.windows(stream, length, self.sequences)]

    def _of_ids(self, source: Ids) -> list[list[int]]:
        if source.values.ndim == 2:
            length = source.values.shape[1] if self.asked is None else self.asked
            self._require_enough(source.name, source.values.shape[1], length)
            if length > self.longest:
                raise CurvlensError(
                    f"The rows of {source.name} have {length} tokens, more than the {self.longest} that "
                    f"{self.target!r} takes. Use --tokens {self.longest}."
                )
            if length < 2:
                raise CurvlensError(f"The rows of {source.name} have one token: nothing follows it.")
            return [row[:length].tolist() for row in source.values[: self.sequences]]
        self._require_enough(source.name, len(source.values), self.tokens)
        return made.windows(source.values[: self.tokens * self.sequences].tolist(), self.tokens, self.sequences)

    @staticmethod
    def _require_enough(name: str, there: int, length: int) -> None:
        if there < length:
            raise CurvlensError(
                f"{name} has {there} tokens, not enough for one sequence of {length}. Use --tokens {max(2, there)}."
            )

    def _beginning(self, words: str, needed: int) -> list[int]:
        """Tokens of the beginning of a text, of all of it if it is short: a long one takes minutes."""
        size = 16 * needed + 256
        while True:
            ids = self._encoded(words[:size], special=self.kind == "causal-lm")
            if size >= len(words) or len(ids) >= needed + 32:  # the last tokens depend on where the text was cut
                return ids
            size *= 4

    def _encoded(self, words: str, *, special: bool) -> list[int]:
        assert self.tokenizer is not None
        return list(self.tokenizer(words, add_special_tokens=special, verbose=False)["input_ids"])

    def _ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind a text."""
        whole, bare = (self._encoded("a", special=special) for special in (True, False))
        for at in range(len(whole) - len(bare) + 1):
            if bare and whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return [], []

    def _of_lines(self, source: Lines) -> Iterator[Sample]:
        """A sample a line. Lines with too few tokens are left out, and this is told."""
        make: Callable[[Line], Sample | None] = {
            "classification": self._labelled,
            "token-classification": self._words,
            "seq2seq-lm": self._pair,
        }.get(self.kind, self._line)
        count = short = 0
        for line in source:
            sample = make(line)
            if sample is None:
                short += 1
                continue
            count += 1
            yield sample
            if count == self.sequences:
                break
        if short:
            self.notes.append(f"{short} line{'' if short == 1 else 's'} with too few tokens left out.")

    def _get(self, line: Line, key: str, kind: type) -> Any:
        if key not in line.values:
            there = listing(line.values) if line.values else "none"
            raise CurvlensError(f"{line.name} lacks {key!r}. Expected {_KEYS[self.kind]}; the keys are {there}.")
        value = line.values[key]
        if not isinstance(value, kind):
            raise CurvlensError(f"{line.name}: {key!r} is {a_kind(value)}, expected a {kind.__name__}.")
        return value

    def _cut(self, **text: str) -> list[int]:
        assert self.tokenizer is not None
        return list(self.tokenizer(**text, truncation=True, max_length=self.tokens)["input_ids"])

    def _line(self, line: Line) -> Sample | None:
        """A text, or for a causal model an input and a target, of which only the target counts."""
        if self.kind == "causal-lm" and "text" not in line.values and {"input", "target"} & set(line.values):
            before, behind = self._ends()
            prompt = [*before, *self._encoded(self._get(line, "input", str), special=False)]
            answer = [*self._encoded(self._get(line, "target", str), special=False), *behind]
            if len(prompt) >= self.tokens:
                raise CurvlensError(
                    f"{line.name}: the input has {len(prompt)} tokens, which leaves none of --tokens {self.tokens} for "
                    f"the target. Use --tokens {len(prompt) + len(answer)}."
                )
            answer = answer[: self.tokens - len(prompt)]
            return Sample(prompt + answer, [IGNORED] * len(prompt) + answer) if prompt and answer else None
        ids = self._cut(text=self._get(line, "text", str))
        return Sample(ids, ids) if len(ids) > 1 else None

    def _pair(self, line: Line) -> Sample | None:
        ids = self._cut(text=self._get(line, "input", str))
        answer = self._cut(text_target=self._get(line, "target", str))
        return Sample(ids, answer) if ids and answer else None

    def _labelled(self, line: Line) -> Sample | None:
        text = self._get(line, "text", str)
        ids = self._cut(text=text)
        return Sample(ids, self._label(line, self._get(line, "label", object))) if ids else None

    def _words(self, line: Line) -> Sample | None:
        """Words with a label each, which is that of a word's first token; the others do not count."""
        assert self.tokenizer is not None
        words, labels = self._get(line, "words", list), self._get(line, "labels", list)
        if len(words) != len(labels) or not all(isinstance(word, str) for word in words):
            raise CurvlensError(f"{line.name}: {len(words)} words and {len(labels)} labels. Give one label a word.")
        found = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.tokens)
        classes = [self._label(line, label) for label in labels]
        places: list[int | None] = found.word_ids()
        firsts = [p is not None and p not in places[:i] for i, p in enumerate(places)]
        marked = [classes[p] if first and p is not None else IGNORED for p, first in zip(places, firsts, strict=True)]
        return Sample(list(found["input_ids"]), marked) if any(firsts) else None

    def _label(self, line: Line, given: Any) -> int:
        names = getattr(self.config, "label2id", None) or {}
        if isinstance(given, str) and given in names:
            return int(names[given])
        count = int(self.config.num_labels)
        if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < count:
            raise CurvlensError(
                f"{line.name} has the label {given!r}, and the model has {count} classes. Give 0 to {count - 1}, or a "
                f"name: {listing(names)}."
            )
        return given

    def _masked(self, samples: list[Sample], size: int, name: str) -> list[Sample]:
        self.notes.append("Masked tokens: 80 % are the mask token, 10 % random, 10 % unchanged; --seed chooses them.")
        chosen = [made.masked(sample, self.tokenizer, size, self.generator) for sample in samples]
        found = [sample for sample in chosen if sample is not None]
        if not found:
            raise CurvlensError(f"{name} has no token to mask: all are special, or unknown to the tokenizer.")
        return found
