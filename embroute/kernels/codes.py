"""Small numbers that kernels and plans share. A cell is one worker's copy of one row."""

# A cell: slot + 1 in the low 28 bits (0: no copy), and two bits about the copy.
SLOT_MASK = (1 << 28) - 1
FRESH = 1 << 28  # has every update of every earlier step
DIRTY = 1 << 29  # holds an update the shard does not have

# The holder of a FRESH or DIRTY copy: no worker, several workers, or else the worker's number.
NO_HOLDER, SEVERAL = -1, -2

# Fields of a slot, side by side: one touch costs one cache line, not four.
ROW = 0  # the row it holds
USED = 1  # step of its last touch, plus one
MARK = 2  # scratch of the step being planned
TICKET = 3  # its valid ticket in the eviction order, plus one; 0 while the slot was never placed
NUM_SLOT_FIELDS = 4

# What a touch needs before the step. A NEW row was never trained: the worker computes its initial
# value from the seed, and no rank sends it.
HIT, MISS, STALE, NEW = 0, 1, 2, 3
UNHELD = 1  # bit of needs without a slot: MISS and NEW

# Who applies the update of a touch.
EXCLUSIVE = 0  # the only toucher, on its own copy
SHARED = 1  # the shard, from the gradients of all touchers
LOCAL = 2  # each toucher on its own copy, merged later (bounded staleness)
REPLICA = 3  # every holder, from an all-reduced gradient
FILL = 4  # no rank: the copy is only brought up to date

# Kinds of transfer, as accounted.
MISS_PULL, STALE_PULL, UPDATE_PUSH, EVICT_PUSH = 0, 1, 2, 3
NUM_KINDS = 4

# Kinds of record, each with its own size.
VALUE, VALUE_STATE, GRADIENT, DELTA = 0, 1, 2, 3
NUM_RECORDS = 4
NOTHING = 255

# When a transfer runs. EARLY: beside the previous step's compute. URGENT: after its backward pass.
# LATE: after the urgent pushes. LAZY: any time before the row's next use.
EARLY, URGENT, LATE, LAZY = 0, 1, 2, 3
NUM_PHASES = 4
MAX_CHUNKS = 8  # of urgent pushes and late pulls: one chunk is pulled while the next is pushed
SHARD_LINK = 3  # in weights of seconds: the shards' link. No worker waits for LAZY, so 3 is free

# Buckets of every eviction order: slots without a copy, copies that never leave, and the order's.
FREE, PINNED, FIRST_BUCKET = 0, 1, 2

NEVER = (1 << 31) - 1  # the step of a use that is not in the window
