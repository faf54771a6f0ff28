"""An independent replay of plans: plain dictionaries, and values that say what they contain.

The value of a row is the set of updates in it, kept as the bits of an integer: bit k is the k-th
update of that row ever made. A lost update is a missing bit, a doubled one is a bit set twice, and
a read is exact if it finds every bit made before the step. Nothing here looks at the library's
cells, clocks or marks; plans and the setup are all it knows.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from embroute.kernels import codes
from embroute.planner.interfaces import Policy
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.plan import Plan
from embroute.planner.setup import Setup
from tests.moves import Copy, Counts, Key, LawBrokenError, Memory, Transfer, demand, lookups, unpack


class Referee(Counts):
    """Replays plans step by step and raises at the first plan that breaks a law."""

    def __init__(self, policy: Policy, setup: Setup) -> None:
        super().__init__(setup)
        self.policy = policy
        self.adds_clocks, self.waits = "release" in policy.sync.name, policy.sync.waits
        self.counts_steps = policy.sync.name.startswith(("ssp", "asp"))
        self.shard, self.shard_clock = defaultdict[int, int](int), defaultdict[int, int](int)
        self.made = defaultdict[int, int](int)  # updates of each row so far
        self.made_before: list[dict[int, int]] = []  # the same before each step
        self.made_by = defaultdict[Key, int](int)  # updates of each worker and row
        self.flying: list[tuple[int, int]] = []  # rows and updates that the next step misses
        self.copies: list[dict[int, Copy]] = [{} for _ in setup.cluster.workers]  # by slot
        self.slot_of: list[dict[int, int]] = [{} for _ in setup.cluster.workers]  # by row
        self.steps: list[list[int]] = []  # numbers of the samples trained
        self.before = Memory()
        self.replicates = False  # whether a row has ever had replicas
        # Of the step being replayed: look-ups of (worker, row), and the mode of each touch.
        self.looked_up = Counter[Key]()
        self.touched: dict[Key, int] = {}
        self.begun: list[Key] = []

    def watch(self, plan: Plan) -> None:
        """Replay one plan."""
        self._count()
        self.first = plan.step == 0
        self.looked_up = lookups(plan, self.setup.num_workers)
        numbers = plan.now.batch.dense[plan.touches.sample_order_S, 0]
        self.steps.append(numbers.astype(int).tolist())
        self.made_before.append(dict(self.made))
        self._modes(plan)
        self._last_pushes_timely()
        if self.policy.sync.shared_memory:
            self.before = self._in_place(plan)
            return
        self._returns(plan)
        landing = self._evictions(plan)
        pulled = self._pulls(plan)
        self._begin(plan)
        self._slots(plan)
        self._reads(pulled)
        flying, self.flying = self.flying, []
        memory = self._updates(plan, self._train())
        for row, update in flying:
            self.shard[row] |= update
        for row, unsent, clock, ticks in landing:
            self._merge(row, unsent, clock, ticks)
        self._drops()
        self.before = memory

    def _in_place(self, plan: Plan) -> Memory:
        """Workers read the rows of shards directly; a sole toucher also writes them."""
        moved = [*unpack(plan.returns), *unpack(plan.evictions), *unpack(plan.pulls)]
        demand(not moved, "a copy moves", moved)
        memory, bits = Memory({row for _, row in self.touched}), dict[Key, int]()
        for row in memory.rows:
            demand(self.shard[row] == self.all_updates(row), "law 3: row", row)
        for key in sorted(self.looked_up):
            bits[key] = 1 << self.made[key[1]]
            self.made[key[1]] += 1
        for move in unpack(plan.updates):
            key = (move.worker, move.row)
            demand(self.touched.get(key) == codes.SHARED, "pushed without cause", move)
            demand(move.record == codes.GRADIENT, "not a gradient", move)
            self.shard[move.row] |= bits.pop(key)
            self._leave(move, codes.UPDATE_PUSH, memory)
        for key, bit in bits.items():
            demand(self.touched[key] == codes.EXCLUSIVE, "law 2: a gradient stays", key)
            self.shard[key[1]] |= bit
        return memory

    def _leave(self, move: Transfer, kind: int, memory: Memory) -> None:
        """An update leaves its worker after the step."""
        self._add(move, kind)
        demand(move.phase in (codes.URGENT, codes.LAZY), "phase of", move)
        (memory.urgent if move.phase == codes.URGENT else memory.lazy).add(move.row)

    def finish(self, home: Transfers, samples: list[int]) -> None:
        """At the end all samples are trained once, and a drain brings every update home."""
        trained = sorted(number for step in self.steps for number in step)
        demand(trained == sorted(samples), "law 1: samples of the run", trained)
        demand(not self.before.urgent, "urgent without a next step", self.before.urgent)
        self.drained(home)

    def drained(self, home: Transfers) -> None:
        """Law 2: with the drain, every update is at the shard exactly once."""
        shard = self.shard.copy()
        for row, update in self.flying:
            shard[row] |= update
        for move in unpack(home):
            copy = self._copy(move)
            if move.record == codes.DELTA:
                demand(not shard[move.row] & copy.unsent, "drain doubles an update", move)
                shard[move.row] |= copy.unsent
            else:
                demand(not shard[move.row] & ~copy.value, "drain overwrites an update", move)
                shard[move.row] = copy.value
        for row in self.made:
            demand(shard[row] == self.all_updates(row), "law 2: drain loses updates of row", row)

    def dirty(self) -> set[Key]:
        """Copies with an update that the shard does not have."""
        copies = [(w, copy) for w, held in enumerate(self.copies) for copy in held.values()]
        return {(worker, copy.row) for worker, copy in copies if not self._clean(copy)}

    def all_updates(self, row: int) -> int:
        """The value that contains every update of the row made so far."""
        return (1 << self.made[row]) - 1

    def _clean(self, copy: Copy) -> bool:
        if self.policy.exact:
            return not copy.value & ~self.shard[copy.row]
        return not copy.unsent

    def _also_at_another(self, worker: int, copy: Copy) -> bool:
        """Whether another worker has a replica with the same value."""
        others = [c for w, held in enumerate(self.copies) if w != worker for c in held.values()]
        return self.replicates and any(
            c.row == copy.row and not copy.value & ~c.value for c in others
        )

    def _copy(self, move: Transfer) -> Copy:
        copy = self.copies[move.worker].get(move.slot)
        if copy is None or copy.row != move.row:
            raise LawBrokenError(f"{copy} in the slot of {move}")
        return copy

    def _modes(self, plan: Plan) -> None:
        """Touches are lookups and rows to fill; a row has one mode, exclusive for one toucher."""
        rows = plan.rows.rows_U[plan.touches.unique_T].tolist()
        keys = list(zip(plan.touches.worker_T.tolist(), rows, strict=True))
        self.touched = dict(zip(keys, plan.decision.mode_T.tolist(), strict=True))
        demand(len(self.touched) == len(keys), "a touch is listed twice")
        self.dropped = {keys[t] for t in np.flatnonzero(plan.decision.drop_T).tolist()}
        self.replicates |= not {codes.FILL, codes.REPLICA}.isdisjoint(self.touched.values())
        real = {key for key, mode in self.touched.items() if mode != codes.FILL}
        demand(set(self.looked_up) <= set(keys), "look-ups without a touch")
        by_row = defaultdict[int, list[int]](list)
        for (_, row), mode in self.touched.items():
            by_row[row].append(mode)
        for row, modes in by_row.items():
            demand(len(set(modes)) == 1, "row", row, "has modes", modes)
            alone = len(modes) == 1 or modes[0] != codes.EXCLUSIVE
            demand(alone, "exclusive row", row, "is shared")
        extra = {key for key in real - set(self.looked_up) if self.touched[key] != codes.REPLICA}
        demand(not extra, "touches nobody looks up", extra)

    def _last_pushes_timely(self) -> None:
        """Urgent pushes of the step before are needed now, lazy pushes are not."""
        rows = {row for _, row in self.touched}
        demand(self.before.urgent <= rows, "urgent but not needed", self.before.urgent - rows)
        late = self.before.lazy & rows if self.waits else set()
        demand(not late, "lazy but needed", self.before.lazy & rows)

    def _home(self, move: Transfer) -> None:
        """A whole value replaces the shard's value and must contain all its updates."""
        copy = self._copy(move)
        demand(move.record == codes.VALUE_STATE and copy.has_state, "no optimizer state in", move)
        demand(not self.shard[move.row] & ~copy.value, "overwrites an update", move)
        self.shard[move.row] = copy.value

    def _merge(self, row: int, unsent: int, clock: int, ticks: int) -> None:
        """HET: add an accumulated update; the clock becomes the larger clock, or the sum."""
        demand(not self.shard[row] & unsent, "an update of row", row, "arrives twice")
        self.shard[row] |= unsent
        now = self.shard_clock[row] + (ticks if self.adds_clocks else 0)
        self.shard_clock[row] = max(now, clock)

    def _on_time(self, move: Transfer) -> int:
        """A row trained in the step before exists only after its backward pass."""
        trained = (move.worker, move.row) in self.before.copies
        right = codes.URGENT if trained else codes.EARLY
        demand(move.phase == right, "trained in the step before:", trained, move)
        return move.phase

    def _returns(self, plan: Plan) -> None:
        self.late_homes: set[int] = set()
        for move in unpack(plan.returns):
            self._add(move, codes.UPDATE_PUSH)
            if self._on_time(move) == codes.URGENT:
                self.late_homes.add(move.row)
            copy = self._copy(move)
            demand(not self._clean(copy), "nothing to return", move)
            if self.policy.exact:
                self._home(move)
                continue
            demand(move.record == codes.DELTA, "not a delta", move)
            self._merge(*copy.send(self.adds_clocks))

    def _evictions(self, plan: Plan) -> list[tuple[int, int, int, int]]:
        """Values of copies that lose their slot; the values of HET land after the step's reads."""
        landing = []
        for move in unpack(plan.evictions):
            self._add(move, codes.EVICT_PUSH)
            copy = self._copy(move)
            demand((move.worker, move.row) not in self.touched, "evicted in use", move)
            demand(not self._clean(copy), "nothing to push", move)
            if self.policy.exact:
                self._on_time(move)
                self._home(move)
                continue
            lazily = move.phase == codes.LAZY and move.record == codes.DELTA
            demand(lazily, "HET evicts lazily", move)
            landing.append(copy.send(self.adds_clocks))
        return landing

    def _pulls(self, plan: Plan) -> set[Key]:
        pulled = set()
        capacity_WA = self.setup.capacity_WA
        for move in unpack(plan.pulls):
            worker, row, slot = move.worker, move.row, move.slot
            held = row in self.slot_of[worker]
            self._add(move, codes.STALE_PULL if held else codes.MISS_PULL)
            demand((worker, row) in self.touched, "pulled for nobody", move)
            with_state = self.touched[worker, row] != codes.SHARED
            demand(move.record == (codes.VALUE, codes.VALUE_STATE)[with_state], "record", move)
            self._overlap(move)
            demand(self.setup.arenas[move.arena] == self.width_R[row], "wrong arena", move)
            room = capacity_WA[worker].tolist()
            place = slot - sum(room[: move.arena])
            demand(0 <= place < room[move.arena], "law 5: slot outside its arena", move)
            old = self.copies[worker].get(slot)
            self._make_room(move)
            clock = self.shard_clock[row]
            new = Copy(row, self.shard[row], with_state, clock, clock)
            if old is not None and old.row == row and self.adds_clocks:
                new.keep(old)
            self.copies[worker][slot] = new
            self.slot_of[worker][row] = slot
            pulled.add((worker, row))
        return pulled

    def _begin(self, plan: Plan) -> None:
        """Rows that workers initialise: values without updates."""
        new = np.flatnonzero(plan.decision.need_T == codes.NEW)
        rows = plan.rows.rows_U[plan.touches.unique_T[new]].tolist()
        self.begun = list(zip(plan.touches.worker_T[new].tolist(), rows, strict=True))
        slots = plan.placement.slot_T[new].tolist()
        for (worker, row), slot in zip(self.begun, slots, strict=True):
            demand(self.setup.seeded, "nobody may make row", row)
            demand(self.made[row] == 0, "law 3: made, but trained before: row", row)
            self._make_room(Transfer(worker, row, slot, 0, 0, codes.VALUE_STATE, codes.LATE))
            self.copies[worker][slot] = Copy(row, 0, True, 0, 0)
            self.slot_of[worker][row] = slot

    def _make_room(self, move: Transfer) -> None:
        """A pull overwrites the same row, an empty slot, or a clean copy that is not used now."""
        worker = move.worker
        held = self.slot_of[worker].get(move.row, move.slot)
        demand(held == move.slot, "law 5: row held twice", move)
        old = self.copies[worker].get(move.slot)
        if old is None:
            return
        safe = self._clean(old) or self._also_at_another(worker, old)
        safe |= self.adds_clocks and old.row == move.row  # pending updates stay in the copy
        demand(safe, "law 2: overwrites an update of row", old.row, move)
        if old.row != move.row:
            demand((worker, old.row) not in self.touched, "law 5: in use: row", old.row, move)
            del self.slot_of[worker][old.row]

    def _overlap(self, move: Transfer) -> None:
        """An early pull runs while the step before computes: neither row nor slot is busy."""
        busy = move.row in self.before.rows or (move.worker, move.slot) in self.before.slots
        if move.phase == codes.EARLY:
            training = self.waits and move.row in self.before.rows
            demand(not training, "early pull of a row in training", move)
            busy = (move.worker, move.slot) in self.before.slots
            demand(not busy, "early pull into a slot in use", move)
            demand(move.row not in self.late_homes, "early pull before a late return", move)
        else:
            # Nothing runs before the first step, and a hot set is filled at a swap.
            needless = not (busy or self.first or self.policy.order_changed)
            demand(move.phase == codes.LATE and not needless, "late without need", move)

    def _slots(self, plan: Plan) -> None:
        """Every lookup finds its row in the slot of its touch."""
        batch, touch_L, slot_T = plan.now.batch, plan.touches.touch_of_lookup, plan.placement.slot_T
        slots = [int(slot_T[touch]) if touch >= 0 else -1 for touch in touch_L]
        bounds, at = batch.sample_offsets, 0
        for s in plan.touches.sample_order_S.tolist():
            held = self.copies[int(plan.worker_S[s])]
            for row in batch.rows[bounds[s] : bounds[s + 1]].tolist():
                found = held[slots[at]].row if slots[at] in held else -1
                demand(found == row, "look-up of row", row, "finds row", found)
                at += 1
        demand(at == len(slots), "slots without a look-up")

    def _reads(self, pulled: set[Key]) -> None:
        """Laws 3 and 4."""
        bound = self.policy.sync.bound
        for worker, row in self.touched:
            demand(row in self.slot_of[worker], "worker", worker, "lacks row", row)
            copy = self.copies[worker][self.slot_of[worker][row]]
            if self.policy.exact:
                demand(copy.value == self.all_updates(row), "law 3: worker", worker, "row", row)
            elif self.counts_steps:
                known = self.made_before[max(0, len(self.made_before) - 1 - bound)].get(row, 0)
                demand(not (1 << known) - 1 & ~copy.value, "law 4: steps behind", worker, row)
            elif (worker, row) not in pulled:
                clock = copy.start if self.adds_clocks else copy.clock
                demand(copy.clock <= copy.start + bound, "law 4: unsent", worker, row)
                demand(self.shard_clock[row] <= clock + bound, "law 4: stale", worker, row)
            mine = self.made_by[worker, row] if self.waits else 0
            demand(not mine & ~copy.value, "worker", worker, "misses its own updates of", row)

    def _train(self) -> dict[Key, int]:
        """One update per worker and row, applied where the mode says."""
        bits, reduced = {}, defaultdict[int, int](int)
        for worker, row in sorted(self.looked_up):
            bit, mode = 1 << self.made[row], self.touched[worker, row]
            self.made[row] += 1
            bits[worker, row] = bit
            self.made_by[worker, row] |= bit
            demand(mode != codes.FILL, "a row that is read is not trained:", row)
            copy = self.copies[worker][self.slot_of[worker][row]]
            if mode == codes.REPLICA:
                reduced[row] |= bit
            elif mode in (codes.EXCLUSIVE, codes.LOCAL):
                demand(copy.has_state, "no optimizer state: worker", worker, "row", row)
                copy.value |= bit
            if mode == codes.LOCAL:
                copy.unsent |= bit
                copy.clock += self.looked_up[worker, row] if self.adds_clocks else 1
                demand(copy.unsent.bit_count() <= self.policy.sync.bound + 1, "law 4: unsent")
        for row, update in reduced.items():
            self._reduce(row, update)
        return bits

    def _reduce(self, row: int, update: int) -> None:
        """Every worker has a replica, all replicas are equal, and all apply the sum."""
        for worker, slots in enumerate(self.slot_of):
            demand(row in slots, "worker", worker, "has no replica of", row)
            copy = self.copies[worker][slots[row]]
            demand(copy.value | update == self.all_updates(row), "replicas differ: row", row)
            demand(copy.has_state, "no optimizer state: worker", worker, "row", row)
            copy.value |= update

    def _updates(self, plan: Plan, bits: dict[Key, int]) -> Memory:
        """Updates that leave after the step; returns the memory for the next step."""
        memory = Memory({row for _, row in bits})
        reduced = {key[1] for key in bits if self.touched[key] == codes.REPLICA}
        everyone = {(w, row) for w in range(self.setup.num_workers) for row in reduced}
        memory.copies = set(self.touched) | everyone
        memory.slots = {(w, self.slot_of[w][row]) for w, row in memory.copies}
        newest = {row: self.shard[row] for row in memory.rows}  # the shard's, at the reads
        for (_, row), bit in bits.items():
            newest[row] |= bit
        pushed = set()
        for move in unpack(plan.updates):
            key = (move.worker, move.row)
            demand(key in bits and key not in pushed, "pushed without cause", move)
            copy = self._copy(move)
            pushed.add(key)
            if not self.waits:  # only gradients may be late
                demand(move.record == codes.GRADIENT, "not a gradient", move)
                self.flying.append((move.row, bits[key]))
            elif move.record == codes.DELTA:
                demand(not self.policy.exact, "a delta of an exact policy", move)
                self._merge(*copy.send(self.adds_clocks))
            elif move.record == codes.GRADIENT:
                kind = self.touched[key]
                demand(kind in (codes.EXCLUSIVE, codes.SHARED), "no gradient to push", move)
                current = newest[move.row] == self.all_updates(move.row)
                demand(current, "gradient meets an old value", move)
                self.shard[move.row] |= bits[key]
            else:
                self._home(move)
            evicted = key in self.dropped and move.record != codes.GRADIENT
            self._leave(move, codes.EVICT_PUSH if evicted else codes.UPDATE_PUSH, memory)
        kept = {key for key in bits if self.touched[key] == codes.SHARED} - pushed
        demand(not kept, "law 2: gradients of shared rows stay", kept)
        return memory

    def _drops(self) -> None:
        for worker, row in self.dropped:
            copy = self.copies[worker].pop(self.slot_of[worker].pop(row))
            demand(self._clean(copy), "law 2: dropped with an update: worker", worker, "row", row)
