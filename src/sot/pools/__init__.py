"""Poolings of others, to compare with. They come to `core` as plug-ins do: by name."""
