"""HET, Herald and FAE counted by the rules of their papers, without the planner.

A cache is a dictionary in the order of use: the first entry was used longest ago. A step is a list
of samples, a sample a list of rows. Counts are miss pulls, stale pulls, update pushes and evict
pushes of each worker, added over the steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Samples = Sequence[Sequence[int]]
Counts = npt.NDArray[np.int64]
MISS, STALE, UPDATE, EVICT = range(4)


def lookups_of(samples: Samples, worker_S: Iterable[int], workers: int) -> list[Counter[int]]:
    """Look-ups of each worker's rows, in the order of first use."""
    found = [Counter[int]() for _ in range(workers)]
    for sample, worker in zip(samples, worker_S, strict=True):
        found[worker].update(sample)
    return found


def touchers_of(lookups: Sequence[Counter[int]]) -> dict[int, list[int]]:
    """The workers that use each row."""
    users = defaultdict(list)
    for worker, rows in enumerate(lookups):
        for row in rows:
            users[row].append(worker)
    return users


def victims(cache: dict[int, object], used: Counter[int], room: int) -> list[int]:
    """LRU: the rows that leave a cache so that all rows of the step have room."""
    excess = len(cache.keys() | used.keys()) - room
    return [row for row in cache if row not in used][: max(0, excess)]


@dataclass
class HetRow:
    """A row's clock at its shard, and its copies by worker: [start, clock]."""

    clock: int = 0
    copies: dict[int, list[int]] = field(default_factory=dict)

    def invalid(self, users: Iterable[int], bound: int) -> Iterator[int]:
        """Copies that may not be read; the push of one may make another too old."""
        held = [w for w in users if w in self.copies]
        while held:
            for w in held:
                start, clock = self.copies[w]
                if clock > start + bound or self.clock > clock + bound:
                    self.clock = max(self.clock, clock)
                    held.remove(w)
                    yield w
                    break
            else:
                return


def count_het(steps: Sequence[Samples], workers: int, room: int, bound: int) -> Counts:
    """The paper's rules. Samples are dealt in turn; all pushes of a step precede its pulls."""
    counts = np.zeros((workers, 4), np.int64)
    caches: list[dict[int, object]] = [{} for _ in range(workers)]
    rows = defaultdict[int, HetRow](HetRow)
    for samples in steps:
        lookups = lookups_of(samples, (i % workers for i in range(len(samples))), workers)
        left = []
        for row, users in touchers_of(lookups).items():
            for w in rows[row].invalid(users, bound):
                start, clock = rows[row].copies.pop(w)
                counts[w] += [0, 1, clock > start, 0]
        for w, cache in enumerate(caches):
            for row in victims(cache, lookups[w], room):
                start, clock = rows[row].copies.pop(w)
                counts[w, EVICT] += clock > start
                left.append((row, clock))
                del cache[row]
            for row in lookups[w]:
                counts[w, MISS] += row not in cache
                cache.pop(row, None)
                cache[row] = None
                # A missing or invalid copy starts at the shard's clock.
                copy = rows[row].copies.setdefault(w, [rows[row].clock, rows[row].clock])
                copy[1] += 1
        for row, clock in left:
            rows[row].clock = max(rows[row].clock, clock)
    return counts


def count_hetu(steps: Sequence[Samples], workers: int, room: int, bound: int) -> Counts:
    """The released code: versions of rows, pending look-ups of copies; pushes after the step."""
    counts = np.zeros((workers, 4), np.int64)
    caches: list[dict[int, object]] = [{} for _ in range(workers)]
    version_of: list[dict[int, int]] = [{} for _ in range(workers)]
    pending_of = [Counter[int]() for _ in range(workers)]
    shard = Counter[int]()
    for samples in steps:
        pushed = Counter[int]()
        lookups = lookups_of(samples, (i % workers for i in range(len(samples))), workers)
        for w, cache in enumerate(caches):
            version, pending = version_of[w], pending_of[w]
            for row in victims(cache, lookups[w], room):
                counts[w, EVICT] += pending[row] > 0
                pushed[row] += pending.pop(row, 0)
                del cache[row], version[row]
            stale = [r for r in lookups[w] if r in cache and shard[r] - version[r] > bound]
            missing = [r for r in lookups[w] if r not in cache]
            version.update({row: shard[row] for row in stale + missing})
            pending.update(lookups[w])
            full = [row for row in lookups[w] if pending[row] > bound]
            for row in full:
                version[row] += pending[row]
                pushed[row] += pending.pop(row)
            counts[w, [MISS, STALE, UPDATE]] += [len(missing), len(stale), len(full)]
            for row in lookups[w]:
                cache.pop(row, None)
                cache[row] = None
        shard.update(pushed)
    return counts


def allocate(samples: Samples, fresh: Sequence[set[int]], first: int) -> list[int]:
    """Herald: each sample to the worker with most of its rows up to date; ties from `first` on."""
    workers, chosen = len(fresh), []
    left = [len(samples) // workers] * workers
    for sample in samples:
        turn = [(first + i) % workers for i in range(workers)]
        open_workers = [w for w in turn if left[w]]
        chosen.append(max(open_workers, key=lambda w: len(fresh[w] & set(sample))))
        left[chosen[-1]] -= 1
    return chosen


def count_herald(steps: Sequence[Samples], workers: int, room: int) -> Counts:
    """Allocation and plan on demand: a push only of what others use, or of what leaves."""
    counts = np.zeros((workers, 4), np.int64)
    caches: list[dict[int, object]] = [{} for _ in range(workers)]
    fresh: list[set[int]] = [set() for _ in range(workers)]
    dirty: list[set[int]] = [set() for _ in range(workers)]
    for step, samples in enumerate(steps):
        worker_S = allocate(samples, fresh, step % workers)
        lookups = lookups_of(samples, worker_S, workers)
        users = touchers_of(lookups)
        for w in range(workers):
            wanted = {row for row in dirty[w] if set(users.get(row, [])) - {w}}
            counts[w, UPDATE] += len(wanted)
            dirty[w] -= wanted
        for w, cache in enumerate(caches):
            for row in victims(cache, lookups[w], room):
                del cache[row]
                counts[w, EVICT] += row in dirty[w]
                fresh[w].discard(row)
                dirty[w].discard(row)
            for row in lookups[w]:
                counts[w, MISS] += row not in cache
                counts[w, STALE] += row in cache and row not in fresh[w]
                cache.pop(row, None)
                cache[row] = None
        for row, sharers in users.items():
            for w in range(workers):  # only the sole trainer of a row has its newest value
                alone = sharers == [w]
                (fresh[w].add if alone else fresh[w].discard)(row)
                (dirty[w].add if alone else dirty[w].discard)(row)
            counts[sharers, UPDATE] += len(sharers) > 1
    return counts


def hot_rows(lookups: Counter[int], tables: Sequence[range], room: int) -> set[int]:
    """FAE: whole tables, the smallest first, as long as they fit; then the most accessed rows."""
    hot: set[int] = set()
    for table in sorted(tables, key=len):
        hot.update(table if len(hot) + len(table) <= room else ())
    others = sorted((row for row in lookups if row not in hot), key=lambda r: (-lookups[r], r))
    return hot | set(others[: room - len(hot)])


def regroup(steps: Sequence[Samples], hot: set[int], buffer: int) -> Iterator[tuple[bool, Samples]]:
    """Rounds of `buffer` steps: batches of samples with a cold row, then of hot samples only."""
    size = len(steps[0])
    pools: tuple[list[Sequence[int]], list[Sequence[int]]] = ([], [])
    for first in range(0, len(steps), buffer):
        for samples in steps[first : first + buffer]:
            for sample in samples:
                pools[set(sample) <= hot].append(sample)
        for is_hot, pool in enumerate(pools):
            last = first + buffer >= len(steps)
            while len(pool) >= size or (last and pool):
                yield bool(is_hot), pool[:size]
                del pool[:size]


def deal(samples: int, workers: int) -> list[int]:
    """Consecutive samples to each worker; the first workers have one more."""
    blocks = [samples // workers + (w < samples % workers) for w in range(workers)]
    return [w for w, count in enumerate(blocks) for _ in range(count)]


def count_fae(
    steps: Sequence[Samples], workers: int, room: int, hot: set[int], buffer: int
) -> Counts:
    """Cold batches write through; hot batches move rows at swaps only, and push each row once."""
    counts = np.zeros((workers, 4), np.int64)
    caches: list[dict[int, object]] = [{} for _ in range(workers)]
    fresh: list[set[int]] = [set() for _ in range(workers)]
    dirty: set[int] = set()  # hot rows that only the replicas have
    first, was_hot = True, False
    for is_hot, samples in regroup(steps, hot, buffer):
        lookups = lookups_of(samples, deal(len(samples), workers), workers)
        users = touchers_of(lookups)
        # Replicas are filled once, and refreshed before hot batches. Others pull what they use.
        wanted = hot if is_hot and not was_hot else hot - users.keys() if first else set()
        for row in dirty if was_hot and not is_hot else ():
            counts[row % workers, UPDATE] += 1
        for w, cache in enumerate(caches):
            unpinned = {row: None for row in cache if row not in hot}
            used = Counter(row for row in lookups[w] if row not in hot)
            pinned = len((cache.keys() | lookups[w].keys() | wanted) & hot)
            for row in victims(unpinned, used, room - pinned):  # type: ignore[arg-type]
                del cache[row]
                fresh[w].discard(row)
            for row in [*lookups[w], *(wanted - lookups[w].keys())]:
                counts[w, MISS] += row not in cache
                counts[w, STALE] += row in cache and row not in fresh[w]
                cache.pop(row, None)
                cache[row] = None
                fresh[w].add(row)
        dirty = dirty | users.keys() if is_hot else set()
        for row, sharers in () if is_hot else users.items():
            for w in range(workers):
                (fresh[w].add if sharers == [w] else fresh[w].discard)(row)
            counts[sharers, UPDATE] += 1
        first, was_hot = False, is_hot
    return counts
