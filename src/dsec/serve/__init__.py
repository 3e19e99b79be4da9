"""The composition root: builds node and API into one process, and starts and stops it."""
