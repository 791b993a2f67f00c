"""All that was proved about an attention, and what was chosen for it, as one text."""

from __future__ import annotations

from ..masks.meaning import Meaning
from ..mla.site import Site
from ..paths.choose import Choice
from .masks import mask_text
from .sites import site_text


def proof_text(site: Site, meaning: Meaning | None, choice: Choice | None) -> str:
    """The site, its mask and its path, as far as they are known."""
    text = site_text(site)
    if meaning is not None:
        text += f"mask\n{_indented(mask_text(site, meaning))}"
    return text if choice is None else text + choice_text(choice)


def choice_text(choice: Choice) -> str:
    """A choice: the path, the reason for it, and the guards under which it holds."""
    return "".join([f"{choice.word}: {choice.reason}\n", *(f"    while {guard}\n" for guard in choice.guards)])


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
