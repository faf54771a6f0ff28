"""embroute's own policy: a search over a window of batches, with its kernels."""
