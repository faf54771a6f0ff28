"""The pure planner: it decides every step from row ids and recorded inputs. No I/O, no torch."""
