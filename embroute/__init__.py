"""embroute: route samples to embeddings, not embeddings to samples."""

from importlib.metadata import version

__version__ = version("embroute")
