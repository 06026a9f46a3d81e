"""Token embeddings: from an image to word tokens."""
