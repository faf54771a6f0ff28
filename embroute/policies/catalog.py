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
from embroute.policies.dispatch.block import block, robin
from embroute.policies.dispatch.esd import esd
from embroute.policies.dispatch.herald import herald
from embroute.policies.embroute.dispatch import search_dispatch
from embroute.policies.embroute.problem import SearchOptions
from embroute.policies.embroute.row_allreduce import on_demand_with_allreduce
from embroute.policies.evict.clairvoyant import clairvoyant
from embroute.policies.evict.recency import lfu, light_lfu, lru, stale_first
from embroute.policies.regroup.hot_cold import SwapSchedule, regroup
from embroute.policies.regroup.hot_set import by_count, by_theory
from embroute.policies.sync.bounded import bounded
from embroute.policies.sync.on_demand import on_demand, pipelined_on_demand, until_last_use
from embroute.policies.sync.replicated import always_replicated, swapped
from embroute.policies.sync.shared_memory import shared_memory
from embroute.policies.sync.write_through import uncached, write_through

Options = Mapping[str, str]


@dataclass(frozen=True)
class PolicyEntry:
    """A name of the catalog: what it makes, its options in order, and a line for the help."""

    make: Callable[[Options], object]
    options: tuple[str, ...]
    about: str


def _order(options: Options) -> Evict:
    orders = {"lru": lru, "lfu": lfu, "light-lfu": light_lfu}
    name = options.get("order", "lru")
    if name not in orders:
        raise ValueError(f"order must be one of {', '.join(orders)}, got {name!r}")
    return orders[name]()


def _herald(options: Options) -> Dispatch:
    tables = options.get("tables", "all")
    ties = options.get("ties", "rotate")
    if ties not in ("rotate", "first"):
        raise ValueError(f"herald: ties must be rotate or first, got {ties!r}")
    return herald(0 if tables == "all" else parse_int("herald: tables", tables, 1), ties)


def _esd(options: Options) -> Dispatch:
    ties = options.get("ties", "block")
    if ties not in ("block", "any"):
        raise ValueError(f"esd: ties must be block or any, got {ties!r}")
    return esd(parse_number("esd: alpha", options.get("alpha", "1"), 0, 1), ties)


def _bound(options: Options) -> int:
    return parse_int("het: bound", options.get("bound", "100"), 0)


def _lookahead(options: Options, default: str) -> int:
    return parse_int("lookahead", options.get("lookahead", default), 1, 10_000)


DISPATCHES: Mapping[str, PolicyEntry] = {
    "block": PolicyEntry(lambda o: block(), (), "samples dealt in blocks"),
    "robin": PolicyEntry(lambda o: robin(), (), "samples dealt one by one"),
    "herald": PolicyEntry(_herald, ("tables", "ties"), "to the worker with most rows up to date"),
    "esd": PolicyEntry(_esd, ("alpha", "ties"), "lowest expected transmission cost"),
}


def _makes(options: Options, default: str) -> bool:
    """Whether workers make rows that nobody has trained yet."""
    new = options.get("new", default)
    if new not in ("made", "pulled"):
        raise ValueError(f"new must be made or pulled, got {new!r}")
    return new == "made"


SYNCS: Mapping[str, PolicyEntry] = {
    "none": PolicyEntry(lambda o: uncached(), (), "pull everything, push everything"),
    "write-through": PolicyEntry(lambda o: write_through(), (), "every update pushed at once"),
    "on-demand": PolicyEntry(lambda o: on_demand(), (), "pushed when another worker needs the row"),
    "streamed": PolicyEntry(
        lambda o: pipelined_on_demand(_makes(o, "pulled")),
        ("new",),
        "on demand, pulled in parts beside the pushes",
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
    shuffle = options.get("shuffle", "no")
    if shuffle not in ("yes", "no"):
        raise ValueError(f"{name}: shuffle must be yes or no, got {shuffle!r}")
    schedule = SwapSchedule(rate, buffer, shuffle == "yes", seed)

    def stream(batches: Iterator[Batch], state: State) -> Iterator[Batch]:
        return regroup(batches, state, schedule)

    choose = by_count(hot) if name == "fae" else by_theory(hot)
    return Regroup(name, choose, stream)


def _fae(options: Options) -> Policy:
    rate = parse_number("fae: rate", options.get("rate", "50"), 1, 100)
    return Policy("fae", block(), swapped(), lru(), _regroup("fae", options, rate))


def _scars(options: Options) -> Policy:
    stage = _regroup("scars", options, 100)
    return Policy("scars", block(), always_replicated(), lru(), stage)


def _bagpipe(options: Options) -> Policy:
    lookahead = _lookahead(options, "200")
    return Policy("bagpipe", block(), until_last_use(lookahead), clairvoyant(lookahead))


def _parts(options: Options, name: str, default: str) -> tuple[float, ...]:
    """Parts of a batch: one for every worker, or one for each such as 0.2+0.1+0."""
    given = options.get(name, default).split("+")
    return tuple(parse_number(f"embroute: {name}", part, 0, 1) for part in given)


def _embroute(options: Options) -> Policy:
    effort = options.get("effort", str(SearchOptions.effort))
    paced = effort == "auto"
    most = (
        SearchOptions.effort
        if paced
        else parse_int("embroute: effort, if not auto,", effort, 1, 10**6)
    )
    ahead = parse_int("embroute: ahead", options.get("ahead", str(SearchOptions.ahead)), 0, 100)
    objective = options.get("objective", "time")
    if objective not in ("time", "cost"):
        raise ValueError(f"embroute: objective must be time or cost, got {objective!r}")
    quotas = options.get("quotas", "free" if objective == "time" else "equal")
    if quotas not in ("free", "equal"):
        raise ValueError(f"embroute: quotas must be free or equal, got {quotas!r}")
    if objective == "cost" and quotas == "free":
        raise ValueError(
            "embroute: quotas must be equal with objective=cost, got free: the fastest link alone "
            "would cost least"
        )
    if quotas == "equal" and ("floor" in options or "ceiling" in options):
        raise ValueError("embroute: floor and ceiling are for quotas=free, got quotas=equal")
    floor, ceiling = _parts(options, "floor", "0"), _parts(options, "ceiling", "1")
    if objective == "cost" and paced:
        raise ValueError("embroute: effort=auto follows the time of a step, got objective=cost")
    makes = _makes(options, "made")
    search = SearchOptions(
        effort=most,
        ahead=ahead,
        paced=paced,
        minimize_time=objective == "time",
        free_quotas=quotas == "free",
        floor=floor,
        ceiling=ceiling,
        local_init=makes,
    )
    return Policy(
        "embroute", search_dispatch(search), on_demand_with_allreduce(makes), stale_first()
    )


DEFAULT_POLICY = "embroute(effort=auto)"  # of training: deciding must not hold it up


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
        lambda o: Policy("het", robin(), bounded(_bound(o)), _order(o)),
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


LOWER_BOUND = "lower-bound"  # compared with policies, and none itself


def _make(kind: str, entries: Mapping[str, PolicyEntry], call: CallSpec) -> object:
    if call.name not in entries:
        raise ValueError(f"no {kind} {shown(call.name)} (there are {', '.join(entries)})")
    entry = entries[call.name]
    return entry.make(bind(call, entry.options))


def _from_parts(text: str, parts: list[str]) -> Policy:
    """A mix such as `dispatch=esd sync=het(10) evict=clairvoyant`."""
    given = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in ("dispatch", "sync", "evict", "workers"):
            raise ValueError(
                f"--policy {text!r}: expected dispatch=, sync=, evict= or workers=, got "
                f"{shown(part)}"
            )
        if key in given:
            raise ValueError(f"--policy {text!r}: {key} is given twice")
        given[key] = value
    dispatch = _make("dispatch", DISPATCHES, parse_call(given.get("dispatch", "block")))
    sync = _make("sync", SYNCS, parse_call(given.get("sync", "on-demand")))
    evict = _make("evict", EVICTS, parse_call(given.get("evict", "lru")))
    assert isinstance(dispatch, Dispatch)
    assert isinstance(sync, Sync)
    assert isinstance(evict, Evict)
    if not sync.caches and dispatch.looks_at_caches:
        raise ValueError(
            f"--policy {text!r}: dispatch={dispatch.name} prefers workers by what they have "
            f"cached, and sync=none caches nothing; use dispatch=block"
        )
    if not sync.caches and "evict" in given:
        raise ValueError(f"--policy {text!r}: sync=none caches nothing, so evict= has no meaning")
    return Policy(text, dispatch, sync, evict, workers=given.get("workers", "all"))


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
    """The policy of a name; an error says which option and which name it is about."""
    try:
        return make_policy(text)
    except ValueError as error:
        fault = str(error).removeprefix(f"--policy {text!r}: ").removeprefix("--policy: ")
        raise ValueError(f"{option} {shown(text)}: {fault}") from None
