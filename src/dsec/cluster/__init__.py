"""Which nodes there are and how to reach them. On one machine: the node in this process."""
