"""Options of the backend: `options={"mla.<name>": value, "<inductor option>": value}`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_origin

import torch._inductor
import torch._inductor.config

from mla_compile.asked import GLUON, OURS
from mla_compile.passes.paths.agreement import NOTHING, SAME, Agreement
from mla_compile.passes.paths.all import AUTO, may_be_asked

from .cost import Device, Link
from .errors import OptionError

PREFIX = "mla."
OFF = "off"
"""The value of `mla.path` that leaves everything to stock Inductor."""
MOST_TOKENS = 2**31 - 1
"""The largest `mla.workspace_tokens`: times heads and widths it still fits into the ops' 64 bits."""

KEEP_ALL, QUERIES = "nothing", "queries"
"""The values of `mla.recompute`."""

PAIRS = {"link": "bytes/s and seconds", "rates": "FLOP/s and bytes/s"}
"""The options that are two numbers, and which."""


@dataclass(frozen=True)
class Options:
    """The `mla.*` options. The field `name` is the option `mla.name`."""

    path: str = AUTO
    """The path that every site takes: the cost model's choice (`auto`), one of the paths that may be asked for by name,
    or `off`, which leaves the graph to stock Inductor."""

    strict: bool = False
    """Raise `StrictError` if an attention of the graph is left unchanged, or if there is none."""

    verify: bool = False
    """Run each rewritten site and its original on the first real inputs, and raise `VerifyError` if they differ."""

    kernels: str = AUTO
    """Which kernels run on a GPU: this project's in Triton (`triton`); the same and those in Gluon, of which two
    have not run on a GPU yet (`gluon`); or `auto`: ours, and another project's kernel where it is installed, takes the
    call, and is known (under `max-autotune`: was measured) to be faster."""

    workspace_tokens: int = 1024
    """The number of keys that the chunked path up-projects at a time, which bounds its workspace."""

    recompute: str = KEEP_ALL
    """What the backward recomputes besides keys and values: `nothing`, or `queries` that are projected from something
    narrower, which is then saved in their place."""

    same_on_ranks: str = NOTHING
    """What is the same on all ranks of a process group that gathers latents, which no graph can tell: `nothing`; the
    `program`; also the `masks` (each rank may have its own heads); also the `queries` (context parallelism alone)."""

    keys_stay: bool = False
    """Leave those latents on their ranks wherever that is possible, even where gathering them would move fewer bytes
    than exchanging queries and outputs, as is the case for a first prompt."""

    link: tuple[float, float] | None = None
    """The bytes/s that a rank receives, and the seconds that an empty message takes. With these, ranks choose the
    exchange that takes the least time."""

    rates: tuple[float, float] | None = None
    """FLOP/s and bytes/s of the device (with several ranks: of each rank's device), used instead of measured rates."""

    @property
    def device(self) -> Device | None:
        """A device with the given `rates`; None if rates are to be measured."""
        return None if self.rates is None else Device("mla.rates", *self.rates)

    @property
    def agreement(self) -> Agreement:
        """What the ranks of a group agree on, from the options about ranks."""
        link = None if self.link is None else Link(*self.link)
        return Agreement(self.same_on_ranks, self.keys_stay, link, self.device)

    def __post_init__(self) -> None:
        known = (AUTO, *may_be_asked(), OFF)
        if self.path not in known:
            raise OptionError(f"mla.path: expected one of {', '.join(known)}, found {self.path!r}")
        for name in ("strict", "verify", "keys_stay"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"mla.{name}: expected True or False, found {getattr(self, name)!r}")
        if self.kernels not in (AUTO, OURS, GLUON):
            raise OptionError(f"mla.kernels: expected {AUTO}, {OURS} or {GLUON}, found {self.kernels!r}")
        if self.recompute not in (KEEP_ALL, QUERIES):
            raise OptionError(f"mla.recompute: expected {KEEP_ALL} or {QUERIES}, found {self.recompute!r}")
        if self.same_on_ranks not in SAME:
            raise OptionError(f"mla.same_on_ranks: expected one of {', '.join(SAME)}, found {self.same_on_ranks!r}")
        for name, what in PAIRS.items():
            if (given := getattr(self, name)) is not None and not _two_numbers(given, least=name == "link"):
                raise OptionError(f"mla.{name}: expected a pair of positive numbers, {what}, found {given!r}")
        tokens = self.workspace_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MOST_TOKENS:
            expected = f"a whole number of keys from 1 to {MOST_TOKENS}"
            raise OptionError(f"mla.workspace_tokens: expected {expected}, found {tokens!r}")


def _two_numbers(given: object, *, least: bool) -> bool:
    """Whether `given` is a tuple of two positive, finite numbers; with `least` the second may also be 0."""
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in given):
        return False
    return 0 < given[0] < math.inf and (0 < given[1] < math.inf or (least and given[1] == 0))


def parse(options: Mapping[str, Any] | None, mode: str | None) -> tuple[Options, dict[str, Any]]:
    """Split `options` into ours (`mla.*`) and Inductor's: all other keys, added to those that `mode` stands for.

    Raises:
        OptionError: for a key that is no string or unknown (the message names the nearest known one), or an invalid
            value or mode.
    """
    given = dict(options or {})
    for key in given:
        if not isinstance(key, str):
            raise OptionError(f"expected names of options that are strings, found {key!r}")
    ours = {key.removeprefix(PREFIX): given.pop(key) for key in list(given) if key.startswith(PREFIX)}
    names = [field.name for field in fields(Options)]
    ours |= {name: tuple(ours[name]) for name in PAIRS if isinstance(ours.get(name), list)}  # JSON has no tuples
    for name in ours:
        if name not in names:
            raise OptionError(_unknown(PREFIX + name, [PREFIX + known for known in names]))
    if mode is not None and not isinstance(mode, str):
        raise OptionError(f"mode: expected a string, found {mode!r}")
    try:
        inductor = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    except RuntimeError as error:
        raise OptionError(f"mode: {error}") from error
    known = torch._inductor.config.get_config_copy()
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise OptionError(_unknown(key, [PREFIX + name for name in names] + list(known)))
        _check_type(name, value)
        inductor[name] = value
    return Options(**ours), inductor


def _check_type(name: str, value: object) -> None:
    """Check the type of a value for one of Inductor's options, where that is no generic one, as `torch.compile` does.

    Raises: OptionError.
    """
    config: Any = torch._inductor.config
    expected = config.get_type(name)
    if get_origin(expected) is None and not isinstance(value, expected):
        raise OptionError(f"{name}: expected a value of type {expected.__name__}, found {value!r}")


def _unknown(key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown option {key!r}: the nearest is {nearest[0]!r}"
