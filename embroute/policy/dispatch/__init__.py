"""Which worker trains which sample."""
