"""All policies: the published systems, embroute's own, and the catalog of names."""
