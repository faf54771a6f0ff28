"""Which row leaves a full cache."""
