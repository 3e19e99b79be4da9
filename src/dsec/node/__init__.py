"""One machine's daemon: it supervises sandboxes, keeps their journal and the record of their output."""
