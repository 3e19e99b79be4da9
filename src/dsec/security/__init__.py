"""What a sandbox may do: system calls, capabilities, hidden paths, id ranges."""
