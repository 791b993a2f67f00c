"""Whether layers that share a length have the tokens of the last step: nobody may read what a layer has not written."""

from __future__ import annotations

from ..errors import CacheMismatchError

_STAYED_BEHIND = -1
"""In place of a number: the layer was left out of a step, after which others went on."""


class Steps:
    """How many of the last tokens each of `layers` layers lacks.

    In a step every layer that takes part writes once, as many tokens as the others; the first one begins it. No layer
    has to take part, but one that was left out cannot go on.
    """

    def __init__(self, layers: int) -> None:
        self._lacks = [0] * layers

    def begins(self, layer: int, count: int) -> bool:
        """Whether `count` tokens of a layer begin a step.

        Raises: CacheMismatchError if the layer does not exist, was left out of a step, or lacks another number of
        tokens in this one.
        """
        if not 0 <= layer < len(self._lacks):
            raise CacheMismatchError(f"expected a layer from 0 to {len(self._lacks) - 1}, found {layer}")
        lacking = self._lacks[layer]
        if lacking == _STAYED_BEHIND:
            raise CacheMismatchError(f"expected tokens of layer {layer} in each step, found none in an earlier one")
        if lacking and lacking != count:
            raise CacheMismatchError(f"expected the {lacking} tokens that layer {layer} lacks, found {count}")
        return not lacking

    def take(self, layer: int, count: int) -> None:
        """Note that a layer writes `count` tokens."""
        if not self._lacks[layer]:
            self._lacks = [_STAYED_BEHIND if lacking else count for lacking in self._lacks]
        self._lacks[layer] = 0

    def crop(self, count: int) -> None:
        """Note that the last `count` tokens of all layers are forgotten."""
        self._lacks = [lacking if lacking == _STAYED_BEHIND else max(0, lacking - count) for lacking in self._lacks]

    def end(self) -> None:
        """Leave out the layers that lack tokens: pages that would hold these may have other holders from now on."""
        self._lacks = [_STAYED_BEHIND if lacking else 0 for lacking in self._lacks]

    def fork(self) -> Steps:
        """End the step, and return a copy."""
        self.end()
        other = Steps(0)
        other._lacks = list(self._lacks)
        return other
