"""The ranks at work: coordinator, shards and workers carry out the planner's plans."""
