"""Options of the backend: `options={"mla.<name>": value, "<inductor option>": value}`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch._inductor
import torch._inductor.config

from mla_compile.kernels.implementations.implementation import GLUON, OURS
from mla_compile.passes.paths.agreement import NOTHING, SAME, Agreement
from mla_compile.passes.paths.all import AUTO, may_be_asked

from .cost import Device, Link
from .errors import OptionError

PREFIX = "mla."
OFF = "off"
"""The value of `mla.path` that leaves all to stock Inductor."""


KEEP_ALL, QUERIES = "nothing", "queries"
"""The values of `mla.recompute`."""


@dataclass(frozen=True)
class Options:
    """What `mla.*` options say. Each field is an option of the same name."""

    path: str = AUTO
    """What a site becomes: what the cost model says (`auto`), always one path, of those that
    may be asked for, or `off`: stock Inductor."""

    strict: bool = False
    """Raise `StrictError` if an attention of the graph is left unchanged."""

    verify: bool = False
    """On the first real inputs run each rewritten site and its original, and raise `VerifyError` if they differ."""

    kernels: str = AUTO
    """What computes on a GPU: this project's kernels (`triton`), those with the warp-specialised ones, which no GPU has
    run yet, where they take a call (`gluon`), or `auto`: `triton`, and other projects' where they are installed, take a
    call, and are known or, under `max-autotune`, measured to be faster."""

    workspace_tokens: int = 1024
    """Keys that the chunked path up-projects at a time: a bound of its workspace."""

    recompute: str = KEEP_ALL
    """What the backward computes again besides keys and values: `nothing`, or the `queries` that are projected from
    something narrower, which is kept instead of them."""

    same_on_ranks: str = NOTHING
    """What the ranks of a process group from which latents are gathered have the same of, which no graph can tell: the
    `program`, `masks` too (each has heads of its own), `queries` too (context parallelism alone), or `nothing`."""

    keys_stay: bool = False
    """Leave those latents on the ranks that have them wherever they can stay there, also where gathering them would be
    fewer bytes than exchanging queries and outputs, as it is for a first prompt."""

    link: tuple[float, float] | None = None
    """Bytes/s that a rank receives, and seconds until a message without bytes is there: ranks then exchange what takes
    the least time."""

    rates: tuple[float, float] | None = None
    """FLOP/s and bytes/s of the device, in place of what is measured: of ranks, that of each."""

    @property
    def device(self) -> Device | None:
        """The device that the rates are of; None where they are to be measured."""
        return None if self.rates is None else Device("mla.rates", *self.rates)

    @property
    def agreement(self) -> Agreement:
        """What the ranks of a group agree on."""
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
        for name, what in (("link", "bytes/s and seconds"), ("rates", "FLOP/s and bytes/s")):
            if (given := getattr(self, name)) is not None and not _two_numbers(given, least=name == "link"):
                raise OptionError(f"mla.{name}: expected a pair of numbers, {what}, found {given!r}")
        tokens = self.workspace_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise OptionError(f"mla.workspace_tokens: expected a positive number of keys, found {tokens!r}")


def _two_numbers(given: object, *, least: bool) -> bool:
    """Whether that is a tuple of two positive, finite numbers, the second at `least` 0 if that is set."""
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in given):
        return False
    return 0 < given[0] < math.inf and (0 < given[1] < math.inf or (least and given[1] == 0))


def parse(options: Mapping[str, Any] | None, mode: str | None) -> tuple[Options, dict[str, Any]]:
    """Our options, and Inductor's: those of `mode` and all keys that do not start with `mla.`.

    Raises:
        OptionError: for a key that neither we nor Inductor know, naming the nearest, or a value that cannot be.
    """
    given = dict(options or {})
    ours = {key.removeprefix(PREFIX): given.pop(key) for key in list(given) if key.startswith(PREFIX)}
    names = [field.name for field in fields(Options)]
    for name in ours:
        if name not in names:
            raise OptionError(_unknown(PREFIX + name, [PREFIX + known for known in names]))
    try:
        inductor = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    except RuntimeError as error:
        raise OptionError(f"mode: {error}") from error
    known = torch._inductor.config.get_config_copy()
    for key in given:
        if key.replace("-", "_") not in known:
            raise OptionError(_unknown(key, [PREFIX + name for name in names] + list(known)))
    inductor |= {key.replace("-", "_"): value for key, value in given.items()}
    return Options(**ours), inductor


def _unknown(key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown option {key!r}: the nearest is {nearest[0]!r}"
