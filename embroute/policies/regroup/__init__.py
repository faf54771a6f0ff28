"""Stages before the window that change the order of samples."""
