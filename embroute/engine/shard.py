"""A shard: holds its part of every table, takes updates in, gives rows out, as the plans say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embroute.engine.control import ControlMessage
from embroute.engine.observe.metrics import ASIDE, DRAIN_PHASE, EARLY_PHASE, URGENT_PHASE, Meter
from embroute.engine.packing import (
    OUTSIDE,
    DeferredSends,
    PendingBlock,
    RowMessage,
    blocks_of_step,
    in_chunks,
    message_bytes,
    unpack_rows,
    views_in,
)
from embroute.engine.schedule import (
    EARLY_LEAVE,
    EARLY_PULL,
    EARLY_PUSH,
    LATE_PULL,
    LAZY_UPDATE,
    URGENT_LEAVE,
    URGENT_PUSH,
    URGENT_UPDATE,
    RankTransfers,
    TransferBlock,
)
from embroute.engine.shared_tables import hear, tell
from embroute.engine.store import RecordWidths, ShardStore
from embroute.kernels.codes import GRADIENT, MAX_CHUNKS
from embroute.transport.buffers import MessageTransport, RecvHandle


class IncomingBlocks(NamedTuple):
    """Blocks of each worker on their way."""

    posted: RecvHandle
    messages: list[list[PendingBlock]]


class Shard:
    """Carries out the phases of each step on the shard's side."""

    def __init__(
        self,
        store: ShardStore,
        widths: RecordWidths,
        transport: MessageTransport,
        workers: Sequence[str],
        meter: Meter,
        in_place: bool = False,
    ) -> None:
        self.store, self.widths, self.transport, self.workers = store, widths, transport, workers
        self.meter, self.in_place = meter, in_place
        self._lazy: DeferredSends[PendingBlock] = DeferredSends()
        self._leaving: DeferredSends[PendingBlock] = DeferredSends()
        self._urgent: list[PendingBlock] = []
        self._parts = MAX_CHUNKS  # of the plan that ordered them

    def step(self, message: ControlMessage) -> None:
        """Both phases before a step: updates come in, then rows go out."""
        meta, heads, index = message.arrays[:3]
        step, orders = self._at(int(meta[0])), RankTransfers.read(heads, index)
        self.meter.message(step, message.nbytes)
        with self.meter.during(EARLY_PHASE, self.transport):
            waiting = self._lazy.take(step) + self._leaving.take(step)
            self._land(waiting + blocks_of_step(step, orders.at(EARLY_PUSH)))
            self._send(blocks_of_step(step, orders.at(EARLY_PULL)))
        self._leaving.add(step + 1, blocks_of_step(step, orders.at(EARLY_LEAVE)))
        parts = int(meta[1])
        with self.meter.during(URGENT_PHASE, self.transport):
            pushes = self._urgent + blocks_of_step(step, orders.at(URGENT_PUSH))
            self._stream(
                pushes, blocks_of_step(step, orders.at(LATE_PULL)), min(parts, self._parts)
            )
            self._meet()
        self._parts = parts
        self._leaving.add(step + 1, blocks_of_step(step, orders.at(URGENT_LEAVE)))
        self._urgent = blocks_of_step(step, orders.at(URGENT_UPDATE))
        self._lazy.add(step + 2, blocks_of_step(step, orders.at(LAZY_UPDATE)))
        self.meter.steps += 1

    def drain(self, message: ControlMessage) -> None:
        """Everything that is still on its way, and every update that workers keep."""
        meta, heads, index = message.arrays[:3]
        step, orders = self._at(int(meta[0])), RankTransfers.read(heads, index)
        with self.meter.during(DRAIN_PHASE, self.transport):
            waiting = self._lazy.take_all() + self._leaving.take_all() + self._urgent
            self._land(waiting + blocks_of_step(step, orders.at(URGENT_PUSH)))
            self._meet()
        self._urgent, self._parts = [], MAX_CHUNKS

    def _meet(self) -> None:
        """Where workers train rows in place: all of them go on when all are done."""
        if self.in_place:
            hear(self.transport, self.workers)
            tell(self.transport, self.workers)

    def _at(self, step: int) -> int:
        """What lands now is there for the reads of this step."""
        if self.store.stamps is not None:
            self.store.stamps.step = step
        return step

    def serve(self, blocks: Sequence[TransferBlock]) -> None:
        """Send rows outside of a step."""
        with self.meter.during(ASIDE, self.transport):
            self._send(blocks_of_step(OUTSIDE, blocks))

    def _stream(
        self, pushes: Sequence[PendingBlock], pulls: Sequence[PendingBlock], parts: int
    ) -> None:
        """Take updates in and give rows out part by part: one goes out while the next come in."""
        coming = [self._expect(own) for own in in_chunks(pushes, parts)]
        going = []
        for i, wanted in enumerate(in_chunks(pulls, parts)):
            self._take(coming[i])
            going.append(self._post(wanted))
        for posted in going:
            posted.wait()

    def _expect(self, expected: Sequence[PendingBlock]) -> IncomingBlocks:
        """Begin to receive blocks."""
        messages, sizes = [], []
        for worker, name in enumerate(self.workers):
            own = [item for item in expected if item.block.peer == worker]
            if own:
                messages.append(own)
                sizes.append((name, message_bytes(own, self.widths)))
        return IncomingBlocks(self.transport.submit([], sizes), messages)

    def _land(self, expected: Sequence[PendingBlock]) -> None:
        self._take(self._expect(expected))

    def _take(self, coming: IncomingBlocks) -> None:
        """Carry blocks out once they are there: worker by worker, each row's gradients summed."""
        arrived = zip(coming.messages, coming.posted.wait(), strict=True)
        parcels = [unpack_rows(own, data, self.widths) for own, data in arrived]
        for parcel in parcels:
            for item, rows in parcel.blocks:
                self.meter.block(item, rows.nbytes)
                if item.block.record != GRADIENT:
                    self.store.write(item.block, rows)
        self._update(parcels)
        coming.posted.release()

    def _update(self, parcels: Sequence[RowMessage]) -> None:
        rates: dict[int, float] = {}
        for parcel in parcels:
            for step, rate in parcel.rates.items():
                if rates.setdefault(step, rate) != rate:
                    raise ValueError(
                        f"step {step}: workers use learning rates {rates[step]} and {rate}; a "
                        f"schedule must depend on the step alone"
                    )
        for step in sorted(rates):
            pushed = [
                (item.block, rows)
                for parcel in parcels
                for item, rows in parcel.blocks
                if item.step == step and item.block.record == GRADIENT
            ]
            self.store.update(pushed, rates[step], step)

    def _send(self, wanted: Sequence[PendingBlock]) -> None:
        self._post(wanted).wait()

    def _post(self, wanted: Sequence[PendingBlock]) -> RecvHandle:
        """Begin to send rows."""
        buffers = []
        for worker, name in enumerate(self.workers):
            mine = [item for item in wanted if item.block.peer == worker]
            if not mine:
                continue
            buffer = self.transport.acquire(name, message_bytes(mine, self.widths))
            for item, rows in views_in(mine, buffer.data, self.widths):
                self.store.read(item.block, rows)
                self.meter.block(item, rows.nbytes)
            buffers.append(buffer)
        return self.transport.submit(buffers, [])
