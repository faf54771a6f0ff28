"""Small numbers that kernels and plans share. A cell is one worker's copy of one row."""

# A cell: slot + 1 in the low bits (0: not held), and what is true of the copy.
SLOT_MASK = (1 << 28) - 1
FRESH = 1 << 28  # has every update of every earlier step
DIRTY = 1 << 29  # holds an update the shard does not have

# Who has a row FRESH or DIRTY: nobody, more than one worker, or else that worker's number.
NO_HOLDER, SEVERAL = -1, -2

# What is known of a slot, side by side: one touch costs one cache line, not four.
ROW = 0  # the row it holds
USED = 1  # step of its last touch, plus one
MARK = 2  # scratch of the step being planned
TICKET = 3  # its valid ticket in the eviction order, plus one; 0 while the slot was never placed
NUM_SLOT_FIELDS = 4

# Bounded staleness keeps two clocks of a slot: the shard's at the pull, and the copy's own.
START, CLOCK = 0, 1

# What a touch needs before the step. A NEW row was never trained by anyone: nobody has to send its
# initial value, the worker makes it.
HIT, MISS, STALE, NEW = 0, 1, 2, 3
UNHELD = 1  # bit of those that have no slot yet: MISS and NEW

# Who applies the update of a touch.
EXCLUSIVE = 0  # the only toucher, on its own copy
SHARED = 1  # the shard, from the gradients of all touchers
LOCAL = 2  # each toucher on its own copy, merged later (bounded staleness)
REPLICA = 3  # every holder, from an all-reduced gradient
FILL = 4  # nobody: the copy is only brought up to date

# Kinds of transfer, as accounted.
MISS_PULL, STALE_PULL, UPDATE_PUSH, EVICT_PUSH = 0, 1, 2, 3
NUM_KINDS = 4

# Kinds of record, each with its own size.
VALUE, VALUE_STATE, GRADIENT, DELTA = 0, 1, 2, 3
NUM_RECORDS = 4
NOTHING = 255

# When a transfer runs: beside the previous step's compute, after its backward pass, after the
# urgent pushes, or any time before the next use.
EARLY, URGENT, LATE, LAZY = 0, 1, 2, 3
NUM_PHASES = 4
MAX_CHUNKS = 8  # in which urgent pushes and late pulls move, the ones beside the others
SHARD_LINK = 3  # in weights of seconds: the shards' link; nobody waits for lazy transfers

# Buckets of every eviction order: slots that hold nothing, copies that never leave, and the rest.
FREE, PINNED, FIRST_BUCKET = 0, 1, 2

NEVER = (1 << 31) - 1  # the step of a use that is not in the window
