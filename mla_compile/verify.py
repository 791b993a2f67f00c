"""`mla.verify`: run the graphs from before and after the passes on the first real inputs, and compare every site."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .dynamo.control_flow import parts
from .errors import VerifyError
from .passes.outcome import SITE, Outcome

ROUNDINGS = 16
"""The factor allowed over one rounding of the output's dtype plus the random walk of float32 sums; see `tolerance`.

It is a margin, not a bound: a score is rounded relative to its own size, and its weight is an exponential, so that no
factor holds for all inputs."""


def tolerance(original: Tensor, shapes: dict[str, str]) -> float:
    """The largest difference between two ways to compute an attention output that rounding explains.

    Sums over the latent width and the keys are in float32, and their errors grow with the square root of the number of
    terms. Each way also rounds operands to the output's dtype a few times. All is relative to the largest output.
    """
    terms = sum(int(shapes[name]) if shapes[name].isdigit() else original.numel() for name in ("L", "T"))
    relative = torch.finfo(original.dtype).eps + torch.finfo(torch.float32).eps * math.sqrt(terms)
    return ROUNDINGS * relative * float(original.abs().max())


Check = Callable[[Sequence[Any]], None]
"""Compares rewritten sites with the originals on real inputs of a graph. Raises VerifyError if they differ."""


class Verified:
    """A compiled function that makes its checks on its first call, and again on the next one if one of them failed."""

    def __init__(self, compiled: Callable[..., Any], checks: Sequence[Check]) -> None:
        self.compiled, self.checks = compiled, checks

    def __call__(self, *inputs: Any) -> Any:
        self.verify(inputs)
        return self.compiled(*inputs)

    def verify(self, inputs: Sequence[Any]) -> None:
        """Make the checks that have not passed yet."""
        for check in self.checks:
            check(inputs)
        self.checks = ()


class VerifiedGraph(Verified):
    """The same for a graph that Inductor compiled, which takes the list of its inputs."""

    _boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        self.verify(inputs)
        return self.compiled(inputs)


def check_of_graph(
    before: fx.GraphModule, after: fx.GraphModule, outcomes: Sequence[Outcome], parameters: Sequence[Any]
) -> Check:
    """A check whose inputs may be None where Inductor has made them constants.

    `parameters` are the values of the first inputs.
    """

    def on(inputs: Sequence[Any]) -> None:
        own = itertools.zip_longest(inputs, parameters[: len(inputs)])
        check(before, after, outcomes, [known if given is None else given for given, known in own])

    return on


def check(before: fx.GraphModule, after: fx.GraphModule, outcomes: Sequence[Outcome], inputs: Sequence[Any]) -> None:
    """Run both graphs on the inputs, with the same random numbers, which stay those that come next.

    Raises:
        VerifyError: if a rewritten site differs from the original. Where inputs are not finite, it may be finite where
            the original is not: keys that no query sees, as the end of a cache, may hold anything.
    """
    sites = {outcome.node: outcome for outcome in outcomes if outcome.rewritten}
    names = {
        f"{prefix}{node.name}": f"{prefix}{node.meta[SITE]}"
        for prefix, part in (("", after), *((f"{name}.", part) for name, part in parts(after).items()))
        for node in part.graph.nodes
        if SITE in node.meta
    }
    original = _outputs(before, inputs, {name: name for name in sites})
    rewritten = _outputs(after, inputs, names)
    finite = functools.cache(lambda: all(map(_is_finite, inputs)))
    for name, site in sites.items():
        if bool(original[name]) != bool(rewritten[name]):  # a branch that was not taken has no values in both
            raise VerifyError(f"mla.verify: {site.location}: only one of the {site.path} path and the original ran")
        for values in zip(original[name], rewritten[name], strict=False):  # data may end a loop a turn earlier in one
            compare(*values, site, finite)


def compare(original: Tensor, rewritten: Tensor, site: Outcome, inputs_are_finite: Callable[[], bool]) -> None:
    """Raise VerifyError if two outputs of a site differ by more than rounding explains, or in where they are finite."""
    if not original.numel():
        return
    finite, ours = original.isfinite(), rewritten.isfinite()
    if (finite & ~ours).any():
        raise VerifyError(f"mla.verify: {site.location}: the {site.path} path is not finite where the original is")
    if (ours & ~finite).any() and inputs_are_finite():
        raise VerifyError(f"mla.verify: {site.location}: the {site.path} path is finite where the original is not")
    original, rewritten = original.where(finite, 0), rewritten.where(finite, 0)
    difference, allowed = float((original - rewritten).abs().max()), tolerance(original, site.shapes)
    if difference > allowed:
        raise VerifyError(
            f"mla.verify: {site.location}: the {site.path} path differs from the original by {difference:.3g}; "
            f"rounding of {str(original.dtype).removeprefix('torch.')} explains {allowed:.3g}"
        )


def _outputs(module: fx.GraphModule, inputs: Sequence[Any], names: dict[str, str]) -> dict[str, list[Tensor]]:
    """The values of the named nodes, one per run of each. Inputs are copied, since the graph may write to them."""
    found: dict[str, list[Tensor]] = {name: [] for name in names.values()}

    class Recorder(fx.Interpreter):
        def __init__(self, module: fx.GraphModule, prefix: str = "") -> None:
            super().__init__(module)
            self.prefix = prefix

        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if (name := names.get(self.prefix + n.name)) is not None:
                found[name].append(value)
            return value

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            value = super().get_attr(target, args, kwargs)
            return Recorder(value, f"{self.prefix}{target}.").run if isinstance(value, fx.GraphModule) else value

    with torch.no_grad(), no_random_numbers_used(inputs):
        Recorder(module).run(*(v.clone() if isinstance(v, Tensor) else v for v in inputs))
    return found


@contextlib.contextmanager
def no_random_numbers_used(inputs: Sequence[Any]) -> Iterator[None]:
    """A context from which random numbers, on the CPU and on the devices of `inputs`, go on as before it."""
    devices = {v.device for v in inputs if isinstance(v, Tensor) and v.device.type not in ("cpu", "meta")}
    with contextlib.ExitStack() as states:
        states.enter_context(torch.random.fork_rng([]))
        for device in devices:
            states.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
        yield


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((value.float() if value.dtype.itemsize == 1 else value).isfinite().all())
