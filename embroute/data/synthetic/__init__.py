"""Synthetic click logs with sessions, drift and correlation."""
