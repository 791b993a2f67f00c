"""What a site becomes whose groups of heads have a latent each: the same path for every group, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..code.reading import realizer, write_as
from ..mla.site import Groups, Site
from .path import Code, Part
from .plan import Plan


@dataclass(frozen=True)
class PlanOfGroups(Plan):
    """A path for every group; `keys` and `mask` are those of the first."""

    sites: tuple[Site, ...]
    """Those of the groups, as the path takes them."""
    plans: tuple[Plan, ...]

    def parts(self, site: Site, workspace_tokens: int) -> list[Part]:
        """All in the place of the attention."""
        assert site.groups is not None
        codes = []
        for plan, own in zip(self.plans, self.sites, strict=True):
            (part,) = plan.parts(own, workspace_tokens)
            codes.append(part.code)
        return [Part(site.node, GroupsCode(site.groups, codes))]


class GroupsCode:
    """The codes of the groups, with their outputs put side by side."""

    said = None

    def __init__(self, groups: Groups, codes: list[Code]) -> None:
        self.groups, self.codes = groups, codes
        self.sources = list(dict.fromkeys(source for code in codes for source in code.sources))

    def __call__(self, *values: Any) -> Tensor:
        given, groups = dict(zip(self.sources, values, strict=True)), self.groups
        outputs = torch.stack([code(*(given[source] for source in code.sources)) for code in self.codes])
        layout = groups.axes, *groups.sites[0].attention.dims
        return write_as(outputs, layout, groups.attention.dims, realizer(values))
