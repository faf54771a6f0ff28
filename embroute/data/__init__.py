"""Samples: schema, batches, sources, readers, generators, windows."""
