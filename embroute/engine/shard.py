"""A shard: holds its part of every table, takes updates in and gives rows out, as plans say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from embroute.engine import packing
from embroute.engine.control import ErrorQueue, Received
from embroute.engine.observe.metrics import ASIDE, DRAIN_PHASE, EARLY_PHASE, URGENT_PHASE, Meter
from embroute.engine.packing import InFlight
from embroute.engine.protocol.messages import (
    Drain,
    EvalEnd,
    Hello,
    Save,
    Serve,
    ShardStep,
    Stop,
    refusal,
)
from embroute.engine.schedule import (
    CHUNK_COUNTS,
    OUTSIDE,
    BlocksByTime,
    TransferBlock,
    TransferTime,
)
from embroute.engine.store import RecordWidths, ShardStore
from embroute.kernels.codes import GRADIENT, MAX_CHUNKS
from embroute.kernels.rows import Floats
from embroute.launch.rank import COORDINATOR
from embroute.transport.interface import Channel, PendingMessages


class Shard:
    """Carries out the phases of each step on the shard's side."""

    def __init__(
        self,
        store: ShardStore,
        widths: RecordWidths,
        transport: Channel,
        workers: Sequence[str],
        meter: Meter,
    ) -> None:
        self.store, self.widths = store, widths
        self.transport, self.workers, self.meter = transport, workers, meter
        # Blocks that wait for the early phase of a later step, in the order of leaving.
        self._lazy: defaultdict[int, list[TransferBlock]] = defaultdict(list)
        self._leaving: defaultdict[int, list[TransferBlock]] = defaultdict(list)
        # Updates that the previous step ordered for this step's urgent phase, in as many chunks.
        self._urgent: list[TransferBlock] = []
        self._chunks = MAX_CHUNKS

    def run(self, messages: ErrorQueue[Received], save: Callable[[int], None]) -> None:
        """Obey the coordinator until it ends the job; `save` writes this rank's checkpoint."""
        while not isinstance((received := messages.get()).message, Stop):
            message = received.message
            if isinstance(message, ShardStep):
                self.meter.message(message.step, received.nbytes)
                self.step(message)
            elif isinstance(message, Drain):
                self.drain(message)
            elif isinstance(message, Serve):
                self.serve(message)
            elif isinstance(message, Save):
                save(message.step)
            elif not isinstance(message, Hello | EvalEnd):
                raise refusal(message, COORDINATOR, "a shard does not expect it")

    def step(self, message: ShardStep) -> None:
        """Both phases before a step: updates come in, then rows go out."""
        step, chunks, blocks = message.step, message.chunks, self._blocks(message)
        if chunks not in CHUNK_COUNTS:
            raise refusal(message, COORDINATOR, f"it has {chunks} chunks")
        self._begin(step)
        with self.meter.during(EARLY_PHASE, step, self.transport):
            deferred = self._lazy.pop(step, []) + self._leaving.pop(step, [])
            self._take(self._expect(deferred + blocks[TransferTime.EARLY_PUSH]))
            self._send(blocks[TransferTime.EARLY_PULL]).wait()
        self._leaving[step + 1] += blocks[TransferTime.EARLY_LEAVE]
        with self.meter.during(URGENT_PHASE, step, self.transport):
            pushes = self._urgent + blocks[TransferTime.URGENT_PUSH]
            # Chunks nest, so the smaller number of both plans cuts the blocks of both.
            self._stream(pushes, blocks[TransferTime.LATE_PULL], min(chunks, self._chunks))
            self.store.meet(self.transport, self.workers)
        self._urgent, self._chunks = blocks[TransferTime.URGENT_UPDATE], chunks
        self._leaving[step + 1] += blocks[TransferTime.URGENT_LEAVE]
        self._lazy[step + 2] += blocks[TransferTime.LAZY_UPDATE]
        self.meter.steps += 1

    def drain(self, message: Drain) -> None:
        """Take in all deferred updates, and every update that workers keep."""
        pushes = self._blocks(message)[TransferTime.URGENT_PUSH]
        self._begin(message.step)
        with self.meter.during(DRAIN_PHASE, message.step, self.transport):
            deferred = packing.take_all(self._lazy) + packing.take_all(self._leaving)
            self._take(self._expect(deferred + self._urgent + pushes))
            self.store.meet(self.transport, self.workers)
        self._urgent, self._chunks = [], MAX_CHUNKS

    def _begin(self, step: int) -> None:
        """In a debug run: updates that arrive from now on are there for the reads of this step."""
        if self.store.stamps is not None:
            self.store.stamps.step = step

    def _blocks(self, message: ShardStep | Drain | Serve) -> BlocksByTime:
        """The blocks of a message. Refuses rows that this shard does not have."""
        num_rows_A = [len(rows) for rows in self.store.records]
        fault = message.transfers.fault(len(self.workers), num_rows_A, num_rows_A)
        if fault:
            raise refusal(message, COORDINATOR, fault)
        return message.transfers.by_time(OUTSIDE if isinstance(message, Serve) else message.step)

    def serve(self, message: Serve) -> None:
        """Send rows outside of a step."""
        pulls = self._blocks(message)[TransferTime.EARLY_PULL]
        with self.meter.during(ASIDE, OUTSIDE, self.transport):
            self._send(pulls).wait()

    def _stream(
        self, pushes: Sequence[TransferBlock], pulls: Sequence[TransferBlock], chunks: int
    ) -> None:
        """Take updates in and give rows out, chunk by chunk.

        The rows of a chunk go out while the updates of the next chunks come in.
        """
        incoming = [self._expect(chunk) for chunk in packing.in_chunks(pushes, chunks)]
        outgoing = []
        for updates, wanted in zip(incoming, packing.in_chunks(pulls, chunks), strict=True):
            self._take(updates)
            outgoing.append(self._send(wanted))
        for sending in outgoing:
            sending.wait()

    def _expect(self, expected: Sequence[TransferBlock]) -> InFlight:
        """Begin to receive blocks."""
        groups = packing.by_peer(expected, self.workers)
        sizes = [(name, packing.message_bytes(blocks, self.widths)) for name, blocks in groups]
        return InFlight(self.transport.submit([], sizes), [blocks for _, blocks in groups])

    def _take(self, incoming: InFlight) -> None:
        """Wait for blocks and put their rows into the store, in the order of workers."""
        arrived, messages = packing.wait_for_rows(incoming, self.widths, self.meter)
        for block, rows in arrived:
            if block.record != GRADIENT:
                self.store.write(block, rows)
        self._update(arrived, list(map(packing.rates_in, incoming.blocks, messages)))
        incoming.messages.release()

    def _update(
        self,
        arrived: Sequence[tuple[TransferBlock, Floats]],
        rates_of_workers: Sequence[dict[int, float]],
    ) -> None:
        """Apply the gradients of each step, with the learning rate of that step."""
        rates: dict[int, float] = {}
        for step, rate in chain.from_iterable(own.items() for own in rates_of_workers):
            if rates.setdefault(step, rate) != rate:
                raise ValueError(
                    f"step {step}: workers use learning rates {rates[step]} and {rate}; a "
                    f"schedule must depend on the step alone"
                )
        for step in sorted(rates):
            pushed = [
                (block, rows)
                for block, rows in arrived
                if block.step == step and block.record == GRADIENT
            ]
            self.store.update(pushed, rates[step], step)

    def _send(self, wanted: Sequence[TransferBlock]) -> PendingMessages:
        """Begin to send rows."""
        buffers = []
        for worker, blocks in packing.by_peer(wanted, self.workers):
            buffer = self.transport.acquire(worker, packing.message_bytes(blocks, self.widths))
            for block, rows in packing.rows_in(blocks, buffer, self.widths):
                self.store.read(block, rows)
                self.meter.block(block, rows.nbytes)
            buffers.append((worker, buffer))
        return self.transport.submit(buffers, [])
