"""Jobs of a deployment: their rows, who watches their leases, and how all nodes are told."""
