"""Compiled loops that turn plans into transfer schedules."""
