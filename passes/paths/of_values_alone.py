"""Choose for a site whose keys stay as they are: its values are up-projected after their sum, if that pays."""

from __future__ import annotations

from dataclasses import replace

from sympy.core.relational import Relational

from ..masks.meaning import Meaning
from ..mla.site import Site
from ..nodes.shapes import hints_of, unbacked_in
from . import all as every
from .choice import Choice, numbers
from .plans import plan_of
from .setting import IN_THE_EXAMPLE, Setting
from .values import ValuesAlone, pays

_VALUES = ValuesAlone()


def where_values_pay(setting: Setting, site: Site) -> tuple[Relational, ...]:
    """The conditions under which the values of a site whose keys stay are better up-projected after their sum.

    Raises:
        Refusal: that of its keys, if this does not pay here. If something else is in the way, it says what.
    """
    why, device = site.unproved_keys, site.node.meta["val"].device.type
    assert why is not None
    if setting.wanted not in (every.AUTO, _VALUES.word):
        raise why
    conditions: tuple[Relational, ...] = ()
    if setting.wanted == every.AUTO:
        hints = hints_of(site.sizes.values(), setting.environment)
        saving = pays(site, setting.device, hints)
        if saving is None or any(map(unbacked_in, saving.conditions)):
            raise why
        if not setting.always(saving.room):
            reason = (
                f"{why.reason}; values alone are not absorbed either, as some declared sizes "
                "have more scores than values"
            )
            raise replace(why, reason=reason)
        conditions = saving.conditions
    if setting.training:
        raise replace(why, reason=f"{why.reason}; values alone are absorbed only without gradients")
    if device != "cpu":
        raise replace(why, reason=f"{why.reason}; values alone are absorbed only on cpu, not on {device}")
    return conditions


def of_values_alone(setting: Setting, site: Site, meaning: Meaning) -> Choice:
    """The choice for a site whose keys stay.

    Raises:
        Refusal: see `where_values_pay`.
    """
    conditions = where_values_pay(setting, site)
    why = f"{_VALUES.why} ({numbers(site)})" if setting.wanted == every.AUTO else "asked for by mla.path"
    if not setting.always(conditions):
        why += IN_THE_EXAMPLE
    guards = setting.guard(conditions) if setting.ranges is None else ()
    return Choice(plan_of(_VALUES, site, meaning), f"{why}; keys as they are: {site.unproved_keys}", guards)
