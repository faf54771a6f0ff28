"""Compiled loops over the planner's state."""
