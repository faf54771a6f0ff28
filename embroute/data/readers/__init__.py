"""One reader a file format; each is a `Source`."""
