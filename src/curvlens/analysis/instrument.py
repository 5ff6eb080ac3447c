"""What an analysis measures: one function for each kind of unit, from its configuration to numbers and tensors."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from curvlens.analysis import attention, attention_theory, tokens
from curvlens.analysis.estimates import row
from curvlens.checkup import doctor
from curvlens.dynamics import SGD, Adam, line, noise, stability
from curvlens.dynamics.update import next_step
from curvlens.errors import CurvlensError, CurvlensWarning
from curvlens.linalg import density, eigs, frobenius, trace
from curvlens.linalg.plan import Ends
from curvlens.linalg.remembered import Remembered
from curvlens.operators import Operator, activation_hessian, functional, ggn, hessian
from curvlens.operators.modules import recordings_of
from curvlens.problem import Problem
from curvlens.profiling import profile
from curvlens.results import Eigs
from curvlens.results.base import to_plain
from curvlens.study import Measured

Config = Mapping[str, Any]
Told = Callable[[int, int | None], None]
KEPT = 512 << 20
"""Bytes of products that an estimate may remember: trace and norm then come from the same ones."""

BESIDE = 4
"""Working vectors that `density` reserves beside its steps."""


class Instrument:
    """Measures a problem. Every method gives numbers that depend on its configuration and on the problem alone."""

    def __init__(
        self, problem: Problem, *, shuffled: Problem | None = None, optimizer: Any = None, progress: Told | None = None
    ) -> None:
        self.problem, self.shuffled, self.optimizer, self.progress = problem, shuffled, optimizer, progress

    @cached_property
    def operators(self) -> dict[str, Operator]:
        """H, G and F, made once: they share their graphs."""
        made: dict[str, Operator] = {"H": hessian(self.problem)}
        try:
            made |= {"G": ggn(self.problem), "F": functional(self.problem)}
        except CurvlensError:
            return made  # a loss without a split point has no G
        return made

    def work(self) -> dict[str, Callable[[Config], Mapping[str, Any] | Measured]]:
        """The function for each kind of unit."""
        kinds = (
            *("clock", "start", "sanity", "doctor", "ggn", "ggn-heads", "whole", "block", "eigs", "ends", "density"),
            *("profile", "depth", "line", "tokens", "attention", "attention-theory", "stability", "adam", "descent"),
            *("noise", "spread", "sharp-part"),
        )
        return {kind: getattr(self, f"measure_{kind.replace('-', '_')}") for kind in kinds}

    # The point

    def measure_start(self, config: Config) -> Mapping[str, Any]:
        """Loss and gradient, and how large gradient and weights are in every block."""
        problem = self.problem
        loss, gradient = problem.loss(), problem.gradient()
        norms = {name: float(part.norm()) for name, part in problem.blocks.split(gradient.double()).items()}
        weights = {name: float(part.norm()) for name, part in problem.blocks.split(problem.theta.double()).items()}
        about = {"loss": loss, "tokens": problem.n_tokens, "gradient_norm": float(gradient.double().norm())}
        return {**about, "gradient_by_block": norms, "weights_by_block": weights}

    def measure_clock(self, config: Config) -> Mapping[str, Any]:
        """The seconds of a gradient, of one sample as a problem of its own and of its gradient, and of products with H
        and G once their graphs are there."""
        gradient = self.problem.gradient()
        seconds = {"gradient": _seconds(self.problem.gradient)}
        samples = tokens.n_samples(self.problem)
        if samples > 1:
            try:
                started = time.perf_counter()
                one = tokens.part_of(self.problem, 0, samples)
                one.gradient()
                seconds["part"] = time.perf_counter() - started
                seconds["sample"] = _seconds(one.gradient)
            except Exception:  # one sample alone may be no batch for the model or the loss
                pass
        probe = torch.ones_like(gradient) / len(gradient) ** 0.5
        for letter in ("H", "G"):
            if letter in self.operators:
                operator = self.operators[letter]
                operator @ probe  # builds the graphs
                seconds[letter] = _seconds(lambda operator=operator: operator @ probe)  # type: ignore[misc]
        return seconds

    def measure_sanity(self, config: Config) -> Mapping[str, Any]:
        """The share of right answers, and the loss where the inputs are shuffled: it has to be higher."""
        shuffled = None if self.shuffled is None else self.shuffled.loss()
        return {"accuracy": tokens.accuracy(self.problem), "shuffled_loss": shuffled}

    def measure_doctor(self, config: Config) -> Mapping[str, Any]:
        """What the doctor finds."""
        found = doctor(self.problem)
        return {
            "findings": [
                {"name": f.name, "severity": f.severity, "what": f.what, "effect": f.effect, "fix": f.fix}
                for f in found
            ]
        }

    # Traces and norms

    def measure_ggn(self, config: Config) -> Mapping[str, Any]:
        """Traces and norms of all blocks of G, from the same backward passes."""
        G, options = self._operator("G"), {"seed": config["seed"], "progress": self.progress}
        traces = trace(G, config["samples"], by="block", **options)
        norms = frobenius(G, config["samples"], by="block", **options) if config["norms"] else {}
        return {
            "trace": {name: row(each) for name, each in traces.items()},
            "norm": {name: row(each) for name, each in norms.items()},
        }

    def measure_ggn_heads(self, config: Config) -> Mapping[str, Any]:
        """Traces of all heads of G."""
        found = trace(self._operator("G"), config["samples"], by="head", seed=config["seed"], progress=self.progress)
        return {"trace": {name: row(each) for name, each in found.items()}}

    def measure_whole(self, config: Config) -> Mapping[str, Any]:
        """Trace and norm of one operator as a whole."""
        return self._sizes(self._operator(config["operator"]), config)

    def measure_block(self, config: Config) -> Mapping[str, Any]:
        """Trace and norm of one diagonal block."""
        return self._sizes(self._operator(config["operator"])[config["block"]], config)

    def _sizes(self, operator: Operator, config: Config) -> Mapping[str, Any]:
        """Trace and norm from the same products."""
        samples = config["samples"]
        most = min(samples, KEPT // (2 * operator.shape[0] * operator.dtype.itemsize + 1))
        kept = Remembered(operator, most)
        options = {"seed": config["seed"], "progress": self.progress}
        found = {"trace": row(trace(kept, samples, **options))}
        if most == samples:  # else it would double the cost
            found["norm"] = row(frobenius(kept, samples, **options))
        return found

    # Spectra

    def measure_eigs(self, config: Config) -> Measured:
        """Eigenvalues at both ends of H, or the largest of G; where their vectors live."""
        found = eigs(
            self._operator(config["operator"]),
            config["k"],
            "both" if config["operator"] != "G" else "largest",
            tol=config["tol"],
            max_products=config["most"],
            seed=config["seed"],
            progress=self.progress,
        )
        result = {**_pairs(found), "mass": found.mass("block")}
        if not self.problem.blocks.headless:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CurvlensWarning)
                result["heads"] = found.mass("head")
        return Measured(result, {"vectors": found.vectors.contiguous()})

    def measure_ends(self, config: Config) -> Mapping[str, Any]:
        """The largest eigenvalue of a block, and the smallest where it may be negative."""
        whole = self._operator(config["operator"])
        ends: Ends = "largest" if config["operator"] == "G" else "both"
        found = eigs(
            whole[config["block"]], 1, ends, tol=config["tol"], max_products=config["most"], seed=config["seed"],
            check_copies=False, progress=self.progress,
        )  # fmt: skip
        return _pairs(found)

    def measure_density(self, config: Config) -> Measured:
        """The spectral density of an operator, of a role in all layers, or of a block."""
        operator = self._operator(config["operator"])
        if config["role"]:
            operator = operator[[name for name, block in self.problem.blocks.items() if block.role == config["role"]]]
        elif config["block"]:
            operator = operator[config["block"]]
        # The schedule limits the steps: what is free on this machine must not decide what is measured.
        vectors = (config["steps"] + BESIDE) * operator.shape[0] * operator.dtype.itemsize
        found = density(
            operator, probes=config["probes"], steps=config["steps"], seed=config["seed"], memory=vectors,
            progress=self.progress,
        )  # fmt: skip
        tensors = {name: getattr(found, name) for name in DENSITY}
        about = {"n": found.n, "probes": found.probes, "error": found.error, "products": found.products}
        return Measured(about, tensors)

    # Where it comes from

    def measure_profile(self, config: Config) -> Mapping[str, Any]:
        """The Gauss–Newton part and the functional part of every module."""
        top = self.pairs(config["top"]) if config["top"] else False
        found = profile(self.problem, config["samples"], seed=config["seed"], top=top, progress=self.progress)
        plain, _ = to_plain(found)
        return {"profile": json.dumps(plain)}

    def measure_depth(self, config: Config) -> Mapping[str, Any]:
        """The trace of H, G and F by the activations that leave a layer."""
        recordings = recordings_of(self.problem, "propagation")
        recordings.known()
        found = {}
        for letter, of in (("H", "hessian"), ("G", "ggn")):
            operator = activation_hessian(self.problem, config["path"], of=of, call=-1)  # type: ignore[arg-type]
            kept = Remembered(operator, config["samples"])
            found[letter] = {
                "trace": row(trace(kept, config["samples"], seed=config["seed"])),
                "norm": row(frobenius(kept, config["samples"], seed=config["seed"])),
            }
        return found

    def measure_attention(self, config: Config) -> Mapping[str, Any]:
        """Entropy, sinks and moments of every head."""
        return attention.seen(self.problem)

    def measure_attention_theory(self, config: Config) -> Mapping[str, Any]:
        """Traces of G by q, k, v of the last attention layer, in closed form."""
        return attention_theory.closed_form(self.problem, config["samples"], config["seed"])

    # Motion

    def measure_line(self, config: Config) -> Mapping[str, Any]:
        """The loss along an eigenvector, beside its quadratic model."""
        found = line(self.problem, self._vector(config))
        return found.to_dict()

    def measure_tokens(self, config: Config) -> Mapping[str, Any]:
        """The tokens whose loss a step along an eigenvector changes most."""
        return tokens.moved(self.problem, self._vector(config), config["radius"], config["most"])

    def measure_stability(self, config: Config) -> Mapping[str, Any]:
        """How far an optimiser is from its edge of stability, and how far along its next step the loss still falls."""
        return self._edge(self.optimizer, config)

    def measure_adam(self, config: Config) -> Mapping[str, Any]:
        """The same of Adam with g² for its second moments: what it has where the gradient has long been this one."""
        return self._edge(Adam(config["lr"]), config)

    def measure_descent(self, config: Config) -> Mapping[str, Any]:
        """The loss along −gradient: multiples of the step are learning rates of gradient descent."""
        return next_step(self.problem, SGD(1.0)).to_dict()

    def _edge(self, optimizer: Any, config: Config) -> Mapping[str, Any]:
        found = stability(
            self.problem, optimizer, tol=config["tol"], max_products=config["most"], fresh=True, progress=self.progress
        ).to_dict()
        try:
            found["update"] = next_step(self.problem, optimizer).to_dict()
        except CurvlensError as error:  # at a stationary point there is an edge and no step
            found["note"] = "; ".join(filter(None, (found["note"], f"no step: {error}")))
        return found

    def measure_noise(self, config: Config) -> Mapping[str, Any]:
        """How much the gradient differs from sample to sample."""
        found = noise(self.problem, samples=config["samples"], seed=config["seed"], progress=self.progress)
        numbers = {name: row(getattr(found, name)) for name in ("trace", "gradient", "scale")}
        scales = {name: row(each) for name, each in found.scales.items()}
        return {**numbers, "scales": scales, "samples": found.samples, "unit": found.each, "note": found.note}

    def measure_spread(self, config: Config) -> Mapping[str, Any]:
        """Loss, gradient norm and trace of G on a part of the data."""
        part = tokens.part_of(self.problem, config["part"], config["of"])
        found = {"loss": part.loss(), "gradient_norm": float(part.gradient().double().norm())}
        if "G" in self.operators:
            found["trace"] = row(trace(ggn(part), config["samples"], seed=config["seed"]))  # type: ignore[assignment]
        return found

    def measure_sharp_part(self, config: Config) -> Mapping[str, Any]:
        """The largest eigenvalue and the trace of H on a part of the data."""
        H = hessian(tokens.part_of(self.problem, config["part"], config["of"]))
        top = eigs(
            H, 1, tol=config["tol"], max_products=config["most"], seed=config["seed"], check_copies=False,
            progress=self.progress,
        )  # fmt: skip
        pair = {"top": float(top.values[0]), "residual": float(top.residuals[0])}
        return {**pair, "trace": row(trace(H, config["samples"], seed=config["seed"]))}

    # Pieces

    def _operator(self, letter: str) -> Operator:
        try:
            return self.operators[letter]
        except KeyError:
            raise CurvlensError(f"This loss has no {letter}: it has no split point between outputs and loss.") from None

    def _vector(self, config: Config) -> Tensor:
        vector: Tensor = self.vectors(config["vector"])
        return vector.to(self.problem.dtype)

    vectors: Callable[[Any], Tensor]
    """Gives an eigenvector that was measured before, by its key and number; set by the analysis."""
    pairs: Callable[[str], Eigs]
    """Gives the eigenvalues of H that were measured before, with their vectors, by their key; set by the analysis."""


DENSITY = ("nodes", "weights", "probe", "settled", "coarse_nodes", "coarse_weights", "lower", "upper", "mass")


def _pairs(found: Eigs) -> dict[str, Any]:
    return {
        "values": found.values.double().tolist(),
        "residuals": found.residuals.double().tolist(),
        "converged": found.converged.tolist(),
        "products": found.products,
        "status": found.status.value,
        "note": found.note,
    }


def _seconds(action: Callable[[], object]) -> float:
    """The median of as many calls as half a second has, up to five: one alone may meet a busy moment."""
    times: list[float] = []
    while len(times) < 5 and (not times or sum(times) < 0.5):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)
