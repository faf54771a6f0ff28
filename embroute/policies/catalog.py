"""Every policy by name, and the parts they are made of. A new system is one more line here.

Users add policies without a line here: `module:function` in any text, an entry point of the group
`embroute.policies`, or `register_policy`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import get_type_hints

from embroute.config.cluster_file import is_file
from embroute.config.signature import call_with
from embroute.config.spec import CallSpec, did_you_mean, parse_call, shown, split_outside
from embroute.planner.interfaces import Dispatch, Evict, Policy, Sync
from embroute.policies.dispatch.block import block, round_robin
from embroute.policies.dispatch.esd import esd
from embroute.policies.dispatch.herald import herald
from embroute.policies.evict import clairvoyant, lfu, light_lfu, lru, stale_first
from embroute.policies.sync.baselines import all_reduced, asynchronous, stale_synchronous
from embroute.policies.sync.bounded import bounded
from embroute.policies.sync.on_demand import on_demand, until_last_use
from embroute.policies.sync.write_through import uncached, write_through
from embroute.policies.systems import (
    allreduce_policy,
    asp_policy,
    bagpipe_policy,
    embroute_policy,
    esd_policy,
    fae_policy,
    herald_policy,
    het_policy,
    in_place_policy,
    nocache_policy,
    pipelined_sync,
    scars_policy,
    ssp_policy,
    vanilla_policy,
)

Part = Dispatch | Sync | Evict
Factory = Callable[..., Policy | Part]
"""A function that makes a policy or a part: its parameters are the options."""
PolicyLike = str | Policy | Part | Factory
"""A text, a policy, a part with the usual other parts, or a function without required arguments."""

DISPATCHES: Mapping[str, Factory] = {
    "block": block,
    "robin": round_robin,
    "herald": herald,
    "esd": esd,
}
SYNCS: Mapping[str, Factory] = {
    "none": uncached,
    "write-through": write_through,
    "on-demand": on_demand,
    "pipelined": pipelined_sync,
    "het": bounded,
    "until-last-use": until_last_use,
    "asp": asynchronous,
    "ssp": stale_synchronous,
    "allreduce": all_reduced,
}
EVICTS: Mapping[str, Factory] = {
    "lru": lru,
    "lfu": lfu,
    "light-lfu": light_lfu,
    "clairvoyant": clairvoyant,
    "stale-first": stale_first,
}
KINDS = {"dispatch": (Dispatch, DISPATCHES), "sync": (Sync, SYNCS), "evict": (Evict, EVICTS)}


def unbounded_policy(of: str = "vanilla") -> Policy:
    """a policy whose caches never fill (reference)"""
    policy = make_policy(of)
    if policy.sync.shared_memory:
        raise ValueError(f"unbounded: of={policy.name} has no caches that could fill")
    return replace(policy, unbounded=True)


SYSTEMS: Mapping[str, Factory] = {
    "nocache": nocache_policy,
    "vanilla": vanilla_policy,
    "asp": asp_policy,
    "ssp": ssp_policy,
    "allreduce": allreduce_policy,
    "het": het_policy,
    "herald": herald_policy,
    "esd": esd_policy,
    "fae": fae_policy,
    "scars": scars_policy,
    "bagpipe": bagpipe_policy,
    "embroute": embroute_policy,
    "in-place": in_place_policy,
    "unbounded": unbounded_policy,
}
LOWER_BOUND = "lower-bound"  # a line of comparisons, not a policy
ENTRY_POINTS = "embroute.policies"  # the group in which packages name their policies
_REGISTERED: dict[str, Factory] = {}


def register_policy(name: str, factory: Factory) -> None:
    """Let users choose a policy by name. The factory's parameters become its options.

    The same factory may be registered again, as a notebook's cell that runs twice does.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise ValueError(
            f"register_policy: a name has letters, digits and _ . - and begins with a letter or _, "
            f"got {shown(name)}"
        )
    if not callable(factory):
        raise ValueError(
            f"register_policy: {shown(name)} needs a function that makes a policy or a part, got "
            f"{shown(factory)}"
        )
    before = _REGISTERED.get(name)
    again = before is not None and _place(before) == _place(factory)
    known = {*SYSTEMS, LOWER_BOUND, *(one for _, entries in KINDS.values() for one in entries)}
    if name in known or not (before is None or again):
        raise ValueError(f"register_policy: {shown(name)} is taken; choose another name")
    _REGISTERED[name] = factory


def _place(factory: Factory) -> object:
    """Module and name of a function, equal if a notebook's cell runs again; else itself."""
    name = getattr(factory, "__qualname__", "<")
    return factory if "<" in name else (factory.__module__, name)  # <lambda>, <locals>


@cache
def installed_policies() -> Mapping[str, EntryPoint]:
    """Policies of installed packages by name; embroute's own names stay its own."""
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    for name in SYSTEMS.keys() & entries.keys():
        package = entries[name].dist.name if entries[name].dist else "unknown"  # type: ignore
        warnings.warn(
            f"the package {package} has a policy {name!r}, which is a policy of embroute: the "
            f"package's one cannot be chosen by name",
            stacklevel=2,
        )
    return {name: entry for name, entry in entries.items() if name not in SYSTEMS}


@contextmanager
def _import_from_here() -> Iterator[None]:
    """Modules of the working folder can be imported, as with `python -m`."""
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


def _loaded(entry: EntryPoint) -> Factory:
    """The function behind an entry point of an installed package."""
    try:
        function: Factory = entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist else "unknown"
        raise ValueError(
            f"{shown(entry.name)}: {entry.value} of the installed package {package} "
            f"cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return function


def _imported(name: str) -> Factory:
    """A user's own function, named `module:function`."""
    module_name, _, attribute = name.partition(":")
    try:
        with _import_from_here():
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{shown(name)}: importing {module_name} failed: {error}") from error
        raise ValueError(
            f"{shown(name)}: there is no module {module_name} in {Path.cwd()} or installed"
        ) from None
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{shown(name)}: importing {module_name} failed: {fault}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ValueError(f"{shown(name)}: {module.__file__} has no function {attribute!r}")
    function: Factory = factory
    _check_annotation(name, function)
    return function


def _check_annotation(name: str, function: Factory) -> None:
    """Refuse a function that does not say that it makes a policy or a part.

    A text may stand in a run file of a stranger, and must not call `os:system`.
    """
    try:
        made = get_type_hints(function).get("return")
    except (NameError, TypeError):  # an annotation of unknown names, or a callable without any
        made = None
    if made not in (Policy, Dispatch, Sync, Evict):
        raise ValueError(
            f"{shown(name)}: the function must be annotated with what it makes: -> Policy, "
            f"Dispatch, Sync or Evict"
        )


def _factory(kind: str, entries: Mapping[str, Factory], name: str) -> Factory:
    """The function behind a name: of the catalog, of a user's module, registered or installed."""
    if name in entries:
        return entries[name]
    if ":" in name:
        return _imported(name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in installed_policies():
        return _loaded(installed_policies()[name])
    known = [
        *entries,
        *_REGISTERED,
        *installed_policies(),
        *([LOWER_BOUND] if entries is SYSTEMS else []),
    ]
    number = re.fullmatch(r"(.+?)-?([0-9.]+)", name.lower())
    if number and number[1] in entries:  # esd1 for esd(1)
        hint = f"; did you mean {number[1]}({number[2]})?"
    elif name.isidentifier() and is_file(f"{name}.py"):
        hint = f"; did you mean {name}:{name}, the function of {name}.py?"
    else:
        hint = did_you_mean(name, known)
    raise ValueError(f"no {kind} {shown(name)} (there are {', '.join(known)}){hint}")


def _usual(name: str) -> Policy:
    """The parts that a policy has if its user names no others."""
    return Policy(name, block(), on_demand(), lru())


def _with(policy: Policy, made: Policy | Part) -> Policy:
    """A policy with another part; a whole policy takes its place."""
    match made:
        case Policy():
            return made
        case Dispatch():
            return replace(policy, dispatch=made)
        case Sync():
            return replace(policy, sync=made)
        case Evict():
            return replace(policy, evict=made)
    raise ValueError(
        f"{policy.name} must make a Policy, Dispatch, Sync or Evict, got {shown(made)}"
    )


def _from_parts(text: str, parts: list[str]) -> Policy:
    """A mix such as `dispatch=esd sync=het(10) evict=clairvoyant`."""
    calls = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in (*KINDS, "workers"):
            raise ValueError(
                f"--policy {text!r}: expected dispatch=, sync=, evict= or workers=, got "
                f"{shown(part)}"
            )
        if key in calls:
            raise ValueError(f"--policy {text!r}: {key} is given twice")
        calls[key] = value
    policy = replace(_usual(text), workers=calls.pop("workers", "all"))
    for kind, value in calls.items():
        (wanted, entries), call = KINDS[kind], parse_call(value)
        made = call_with(_factory(kind, entries, call.name), call)
        if not isinstance(made, wanted):
            raise ValueError(f"--policy {text!r}: {kind}={value} makes no {wanted.__name__}")
        policy = _with(policy, made)
    if policy.sync.copies != "kept" and policy.dispatch.looks_at_caches:
        raise ValueError(
            f"--policy {text!r}: dispatch={policy.dispatch.name} prefers workers by what they have "
            f"cached, and sync=none caches nothing; use dispatch=block"
        )
    if policy.sync.copies != "kept" and "evict" in calls:
        raise ValueError(f"--policy {text!r}: sync=none caches nothing, so evict= has no meaning")
    return policy


def make_policy(policy: PolicyLike) -> Policy:
    """The policy of a name such as `esd(1)`, `esd(1, workers=fast)`, or of a mix of parts.

    A policy stays as it is; a part gets the usual other parts; a function is called without
    arguments.
    """
    if isinstance(policy, Policy | Dispatch | Sync | Evict):
        return _with(_usual(policy.name), policy)
    if not isinstance(policy, str):
        return _with(_usual(name_of(policy)), policy())
    text = policy
    parts = [part for part in split_outside(text, " ") if part]
    if not parts:
        raise ValueError("--policy: expected a name, got an empty text")
    if "=" in parts[0].split("(")[0]:
        return _from_parts(text, parts)
    call = parse_call(text)
    if call.name == LOWER_BOUND:
        raise ValueError(
            f"--policy {text!r}: a line to compare policies with, not a policy; embroute compare "
            f"has it"
        )
    workers = call.options.get("workers", "all")
    options = {key: value for key, value in call.options.items() if key != "workers"}
    factory = _factory("policy", SYSTEMS, call.name)
    made = call_with(factory, CallSpec(call.name, call.args, options))
    return replace(_with(_usual(call.name), made), name=text, workers=workers)


def name_of(policy: PolicyLike) -> str:
    """The name of a policy, of a part, or of the function that makes it."""
    if isinstance(policy, str | Policy | Dispatch | Sync | Evict):
        return policy if isinstance(policy, str) else policy.name
    if isinstance(policy, partial):
        options = {key: str(value) for key, value in policy.keywords.items()}
        return str(CallSpec(name_of(policy.func), tuple(map(str, policy.args)), options))
    return getattr(policy, "__name__", "policy")


def policy_of(option: str, policy: PolicyLike) -> Policy:
    """The policy of a name; errors say which option and which name are wrong."""
    try:
        return make_policy(policy)
    except ValueError as error:
        text = name_of(policy)
        fault = str(error)
        for said in (f"--policy {text!r}: ", "--policy: ", f"{shown(text)}: "):
            fault = fault.removeprefix(said)
        raise ValueError(f"{option} {shown(text)}: {fault}") from None
