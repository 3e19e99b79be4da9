"""Blobs and layers by content, on the local disk."""
