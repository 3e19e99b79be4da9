"""More sandboxes per machine: cgroups, and what they tell."""
