"""Every policy by name, and the parts they are made of. A new system is one more entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from embroute.config.spec import (
    LARGEST_SEED,
    CallSpec,
    bind,
    parse_call,
    parse_int,
    parse_number,
    parse_size,
    shown,
    split_outside,
)
from embroute.data.batch import Batch
from embroute.planner.interfaces import Dispatch, Evict, Policy, Regroup, Sync
from embroute.planner.state import State
from embroute.policies.dispatch.block import block, round_robin
from embroute.policies.dispatch.esd import esd
from embroute.policies.dispatch.herald import herald
from embroute.policies.embroute.dispatch import search_dispatch
from embroute.policies.embroute.row_allreduce import on_demand_with_allreduce
from embroute.policies.embroute.search_state import SearchOptions
from embroute.policies.evict import clairvoyant, lfu, light_lfu, lru, stale_first
from embroute.policies.regroup import SwapSchedule, by_count, by_theory, hot_memory, regroup
from embroute.policies.sync.bounded import bounded
from embroute.policies.sync.on_demand import on_demand, pipelined_on_demand, until_last_use
from embroute.policies.sync.replicated import always_replicated, swapped
from embroute.policies.sync.write_through import shared_memory, uncached, write_through

Options = Mapping[str, str]


@dataclass(frozen=True)
class PolicyEntry:
    """A name of the catalog: what it makes, its options in order, and a line for the help."""

    make: Callable[[Options], object]
    options: tuple[str, ...]
    about: str


def _choice(label: str, options: Options, names: tuple[str, str], default: str) -> str:
    """An option with two possible values; `label` may name the policy: `esd: ties`."""
    value = options.get(label.split()[-1], default)
    if value not in names:
        raise ValueError(f"{label} must be {names[0]} or {names[1]}, got {value!r}")
    return value


def _order(options: Options) -> Evict:
    orders = {"lru": lru, "lfu": lfu, "light-lfu": light_lfu}
    name = options.get("order", "lru")
    if name not in orders:
        raise ValueError(f"order must be one of {', '.join(orders)}, got {name!r}")
    return orders[name]()


def _herald(options: Options) -> Dispatch:
    tables = options.get("tables", "all")
    ties = _choice("herald: ties", options, ("rotate", "first"), "rotate")
    return herald(0 if tables == "all" else parse_int("herald: tables", tables, 1), ties)


def _esd(options: Options) -> Dispatch:
    ties = _choice("esd: ties", options, ("block", "any"), "block")
    return esd(parse_number("esd: alpha", options.get("alpha", "1"), 0, 1), ties)


def _bound(options: Options) -> int:
    return parse_int("het: bound", options.get("bound", "100"), 0)


def _lookahead(options: Options, default: str) -> int:
    return parse_int("lookahead", options.get("lookahead", default), 1, 10_000)


DISPATCHES: Mapping[str, PolicyEntry] = {
    "block": PolicyEntry(lambda o: block(), (), "samples assigned in blocks"),
    "robin": PolicyEntry(lambda o: round_robin(), (), "samples assigned one by one"),
    "herald": PolicyEntry(_herald, ("tables", "ties"), "to the worker with most rows up to date"),
    "esd": PolicyEntry(_esd, ("alpha", "ties"), "lowest expected transmission cost"),
}


def _local_init(options: Options, default: str) -> bool:
    """Whether workers compute the initial values of untouched rows."""
    return _choice("new", options, ("made", "pulled"), default) == "made"


SYNCS: Mapping[str, PolicyEntry] = {
    "none": PolicyEntry(lambda o: uncached(), (), "pull everything, push everything"),
    "write-through": PolicyEntry(lambda o: write_through(), (), "every update pushed at once"),
    "on-demand": PolicyEntry(lambda o: on_demand(), (), "pushed when another worker needs the row"),
    "streamed": PolicyEntry(
        lambda o: pipelined_on_demand(_local_init(o, "pulled")),
        ("new",),
        "on demand, pulled in chunks beside the pushes",
    ),
    "het": PolicyEntry(lambda o: bounded(_bound(o)), ("bound",), "bounded staleness"),
    "until-last-use": PolicyEntry(
        lambda o: until_last_use(_lookahead(o, "200")), ("lookahead",), "kept within the window"
    ),
}
EVICTS: Mapping[str, PolicyEntry] = {
    "lru": PolicyEntry(lambda o: lru(), (), "least recently used"),
    "lfu": PolicyEntry(lambda o: lfu(), (), "least frequently used"),
    "light-lfu": PolicyEntry(lambda o: light_lfu(), (), "ten frequency buckets"),
    "clairvoyant": PolicyEntry(
        lambda o: clairvoyant(_lookahead(o, "20")), ("lookahead",), "needed last in the window"
    ),
    "stale-first": PolicyEntry(
        lambda o: stale_first(), (), "copies that must be pulled again, then LRU"
    ),
}


def _regroup(name: str, options: Options, rate: float) -> Regroup:
    """Hot and cold batches, the hot set by counts (fae) or by theory (scars)."""
    hot = parse_size(f"{name}: hot", options["hot"]) if "hot" in options else None
    seed = parse_int(f"{name}: seed", options.get("seed", "0"), 0, LARGEST_SEED)
    buffer = parse_int(f"{name}: buffer", options.get("buffer", "32"), 2, 10**6)
    shuffle = _choice(f"{name}: shuffle", options, ("yes", "no"), "no")
    schedule = SwapSchedule(rate, buffer, shuffle == "yes", seed)

    def stream(batches: Iterator[Batch], state: State) -> Iterator[Batch]:
        return regroup(batches, state, schedule)

    choose = by_count(hot) if name == "fae" else by_theory(hot)
    return Regroup(name, stream, hot_memory(choose))


def _fae(options: Options) -> Policy:
    rate = parse_number("fae: rate", options.get("rate", "50"), 1, 100)
    return Policy("fae", block(), swapped(), lru(), _regroup("fae", options, rate))


def _scars(options: Options) -> Policy:
    stage = _regroup("scars", options, 100)
    return Policy("scars", block(), always_replicated(), lru(), stage)


def _bagpipe(options: Options) -> Policy:
    lookahead = _lookahead(options, "200")
    return Policy("bagpipe", block(), until_last_use(lookahead), clairvoyant(lookahead))


def _shares(options: Options, name: str, default: str) -> tuple[float, ...]:
    """Shares of a batch: one for every worker, or one for each such as 0.2+0.1+0."""
    shares = options.get(name, default).split("+")
    return tuple(parse_number(f"embroute: {name}", share, 0, 1) for share in shares)


def _embroute(options: Options) -> Policy:
    effort = options.get("effort", str(SearchOptions.effort))
    paced = effort == "auto"
    max_effort = SearchOptions.effort
    if not paced:
        max_effort = parse_int("embroute: effort, if not auto,", effort, 1, 10**6)
    ahead = parse_int("embroute: ahead", options.get("ahead", str(SearchOptions.ahead)), 0, 100)
    objective = _choice("embroute: objective", options, ("time", "cost"), "time")
    default = "free" if objective == "time" else "equal"
    quotas = _choice("embroute: quotas", options, ("free", "equal"), default)
    _check_embroute(options, objective, quotas)
    floor, ceiling = _shares(options, "floor", "0"), _shares(options, "ceiling", "1")
    if objective == "cost" and paced:
        raise ValueError("embroute: effort=auto follows the time of a step, got objective=cost")
    local_init = _local_init(options, "made")
    search = SearchOptions(
        effort=max_effort,
        ahead=ahead,
        paced=paced,
        minimize_time=objective == "time",
        free_quotas=quotas == "free",
        floor=floor,
        ceiling=ceiling,
        local_init=local_init,
    )
    return Policy(
        "embroute", search_dispatch(search), on_demand_with_allreduce(local_init), stale_first()
    )


def _check_embroute(options: Options, objective: str, quotas: str) -> None:
    """Refuse options that contradict each other."""
    if objective == "cost" and quotas == "free":
        raise ValueError(
            "embroute: quotas must be equal with objective=cost, got free: the fastest link alone "
            "would cost least"
        )
    if quotas == "equal" and ("floor" in options or "ceiling" in options):
        raise ValueError("embroute: floor and ceiling are for quotas=free, got quotas=equal")


DEFAULT_POLICY = "embroute(effort=auto)"  # of training: decisions must not delay a step


def _unbounded(options: Options) -> Policy:
    policy = make_policy(options.get("of", "vanilla"))
    if policy.sync.shared_memory:
        raise ValueError(f"unbounded: of={policy.name} has no caches that could fill")
    return replace(policy, unbounded=True)


SYSTEMS: Mapping[str, PolicyEntry] = {
    "nocache": PolicyEntry(
        lambda o: Policy("nocache", block(), uncached(), lru()), (), "a plain parameter server"
    ),
    "vanilla": PolicyEntry(
        lambda o: Policy("vanilla", block(), write_through(), lru()), (), "the yardstick"
    ),
    "het": PolicyEntry(
        lambda o: Policy("het", round_robin(), bounded(_bound(o)), _order(o)),
        ("bound", "order"),
        "HET: bounded staleness (inexact)",
    ),
    "herald": PolicyEntry(
        lambda o: Policy("herald", _herald(o), on_demand(), lru()),
        ("tables", "ties"),
        "Herald: samples to their rows",
    ),
    "esd": PolicyEntry(
        lambda o: Policy("esd", _esd(o), on_demand(), lru()),
        ("alpha", "ties"),
        "ESD: lowest expected cost on unequal links",
    ),
    "fae": PolicyEntry(
        _fae, ("hot", "rate", "buffer", "shuffle", "seed"), "FAE: hot and cold batches"
    ),
    "scars": PolicyEntry(
        _scars, ("hot", "buffer", "shuffle", "seed"), "SCARS: hot set chosen by theory"
    ),
    "bagpipe": PolicyEntry(_bagpipe, ("lookahead",), "BagPipe: cache what the window needs"),
    "embroute": PolicyEntry(
        _embroute,
        ("effort", "ahead", "objective", "quotas", "floor", "ceiling", "new"),
        "our own: rows as workers share them",
    ),
    "in-place": PolicyEntry(
        lambda o: Policy("in-place", block(), shared_memory(), lru()),
        (),
        "one machine: rows trained in memory that all workers share",
    ),
    "unbounded": PolicyEntry(_unbounded, ("of",), "a policy whose caches never fill (reference)"),
}


LOWER_BOUND = "lower-bound"  # a line of comparisons, not a policy


def _make(kind: str, entries: Mapping[str, PolicyEntry], call: CallSpec) -> object:
    if call.name not in entries:
        raise ValueError(f"no {kind} {shown(call.name)} (there are {', '.join(entries)})")
    entry = entries[call.name]
    return entry.make(bind(call, entry.options))


def _from_parts(text: str, parts: list[str]) -> Policy:
    """A mix such as `dispatch=esd sync=het(10) evict=clairvoyant`."""
    calls = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in ("dispatch", "sync", "evict", "workers"):
            raise ValueError(
                f"--policy {text!r}: expected dispatch=, sync=, evict= or workers=, got "
                f"{shown(part)}"
            )
        if key in calls:
            raise ValueError(f"--policy {text!r}: {key} is given twice")
        calls[key] = value
    dispatch = _make("dispatch", DISPATCHES, parse_call(calls.get("dispatch", "block")))
    sync = _make("sync", SYNCS, parse_call(calls.get("sync", "on-demand")))
    evict = _make("evict", EVICTS, parse_call(calls.get("evict", "lru")))
    assert isinstance(dispatch, Dispatch)
    assert isinstance(sync, Sync)
    assert isinstance(evict, Evict)
    if not sync.caches and dispatch.looks_at_caches:
        raise ValueError(
            f"--policy {text!r}: dispatch={dispatch.name} prefers workers by what they have "
            f"cached, and sync=none caches nothing; use dispatch=block"
        )
    if not sync.caches and "evict" in calls:
        raise ValueError(f"--policy {text!r}: sync=none caches nothing, so evict= has no meaning")
    return Policy(text, dispatch, sync, evict, workers=calls.get("workers", "all"))


def make_policy(text: str) -> Policy:
    """The policy of a name such as `esd(1)`, `esd(1, workers=fast)`, or of a mix of parts."""
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
    policy = _make("policy", SYSTEMS, CallSpec(call.name, call.args, options))
    assert isinstance(policy, Policy)
    return replace(policy, name=text, workers=workers)


def policy_of(option: str, text: str) -> Policy:
    """The policy of a name; errors say which option and which name are wrong."""
    try:
        return make_policy(text)
    except ValueError as error:
        fault = str(error).removeprefix(f"--policy {text!r}: ").removeprefix("--policy: ")
        raise ValueError(f"{option} {shown(text)}: {fault}") from None
