"""embroute: route samples to embeddings, not embeddings to samples."""
