"""Ranks as processes: start, rendezvous, liveness, exit codes."""
