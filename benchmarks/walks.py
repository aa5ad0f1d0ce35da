"""Which arms a memory benchmark has: walks over the techniques that a recipe and a machine can use.

alone           none, then each technique by itself
ladder          none, then each switched on in turn on top of those before it
leave-one-out   the whole ladder, then the same without one of them

Alone stands every technique. In the ladder are those that keep the losses and go together, or
exactly those that were asked for, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lean_trl.config import Config, config_from_dict, units_per_step
from lean_trl.recipe import SettingsError
from lean_trl.techniques.technique import Switch

WALKS = ("alone", "ladder", "leave-one-out")
# Techniques without an arm unless they are named.
ASKED_FOR = {"precompute_ref_log_probs": "scores every row before the first step: name it"}


@dataclass
class Plan:
    """Arms by name with their settings; `none` has every technique off.

    Each walk is {what an arm is called there: arm}: one arm may stand in several.
    """

    walks: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, Config] = field(default_factory=dict)
    inexact: set[str] = field(default_factory=set)  # arms that train something else (adapters)
    notes: dict[str, str] = field(default_factory=dict)  # technique -> why it has no arm somewhere

    def add(self, name: str, config: Config, on: Sequence[Switch]) -> str:
        """The arm with these settings: a new one, or the one that has them already."""
        same = next((known for known, other in self.settings.items() if other == config), name)
        self.settings.setdefault(same, config)
        if not all(switch.exact for switch in on):
            self.inexact.add(same)
        return same


def make_plan(
    config: Config,
    switches: Sequence[Switch],
    *,
    ranks: int,
    device_type: str,
    walks: Sequence[str] = WALKS,
    chosen: Sequence[str] | None = None,
) -> Plan:
    """The arms for a run's settings. chosen: techniques by name; raises ValueError for another."""
    known = {switch.name: switch for switch in switches}
    for name in chosen or ():
        if name not in known:
            raise ValueError(f"unknown technique {name!r}; known: {', '.join(known)}")
    # One window of the same rows in every arm, however it is cut.
    size = units_per_step(config.train, ranks)
    config = override(config, {"train.batch_size": size, "data.shuffle": False})
    candidates = [known[name] for name in chosen or known if chosen or name not in ASKED_FOR]
    plan, usable = Plan(), []
    if not chosen:
        plan.notes |= {name: reason for name, reason in ASKED_FOR.items() if name in known}
    for switch in candidates:
        reason = _cannot(config, switch, ranks, device_type)
        if reason is None:
            usable.append(switch)
        else:
            plan.notes[switch.name] = reason
    config = override(config, {key: v for switch in usable for key, v in switch.off.items()})
    plan.add("none", config, [])
    if "alone" in walks:
        plan.walks["alone"] = {"none": "none"} | {
            s.name: plan.add(s.name, override(config, s.on), [s]) for s in usable
        }
    if "ladder" in walks or "leave-one-out" in walks:
        stack = _stack(plan, config, [s for s in usable if chosen or s.exact])
        if "ladder" in walks:
            plan.walks["ladder"] = _ladder(plan, config, stack)
        if "leave-one-out" in walks and stack:
            plan.walks["leave-one-out"] = _leave_one_out(plan, config, stack)
    return plan


def _stack(plan: Plan, config: Config, switches: Sequence[Switch]) -> list[Switch]:
    """Those that go together, in order; plan.notes says why the others do not."""
    stack: list[Switch] = []
    for switch in switches:
        taken = {key: other.name for other in stack for key in other.on}
        both = next((key for key in switch.on if key in taken), None)
        if both is not None:
            plan.notes[switch.name] = f"not in the ladder: sets {both}, as {taken[both]} does"
            continue
        try:
            _with(config, [*stack, switch])
        except SettingsError as error:
            plan.notes[switch.name] = f"not in the ladder: {error}"
            continue
        stack.append(switch)
    return stack


def _ladder(plan: Plan, config: Config, stack: Sequence[Switch]) -> dict[str, str]:
    walk = {"none": "none"}
    for count, switch in enumerate(stack, start=1):
        name, on = f"+ {switch.name}", stack[:count]
        walk[name] = plan.add(name, _with(config, on), on)
    return walk


def _leave_one_out(plan: Plan, config: Config, stack: Sequence[Switch]) -> dict[str, str]:
    walk = {"all": plan.add("all", _with(config, stack), stack)}
    for switch in stack:
        name, on = f"all but {switch.name}", [s for s in stack if s is not switch]
        try:
            walk[name] = plan.add(name, _with(config, on), on)
        except SettingsError as error:  # another technique needs it
            plan.notes[switch.name] = f"not left out: {error}"
    return walk


def _with(config: Config, on: Sequence[Switch]) -> Config:
    return override(config, {key: value for switch in on for key, value in switch.on.items()})


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """The settings with some dotted keys changed. Raises SettingsError when they do not fit."""
    tree = asdict(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place[section] = {} if place[section] is None else place[section]
            place = place[section]
        place[name] = value
    return config_from_dict(tree)


def _cannot(config: Config, switch: Switch, ranks: int, device_type: str) -> str | None:
    """Why the technique has no arm for this recipe on this machine."""
    if ranks < switch.ranks:
        return f"needs {switch.ranks} ranks (--ranks {switch.ranks})"
    if switch.device_type not in (None, device_type):
        return f"needs {switch.device_type}"
    try:
        off = override(config, switch.off)
        return "changes nothing in this recipe" if override(off, switch.on) == off else None
    except SettingsError as error:
        return str(error)
