"""Which rows move, and when an update reaches its shard."""
