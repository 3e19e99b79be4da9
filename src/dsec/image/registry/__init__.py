"""Images of registries that speak the OCI distribution specification: pulling and pushing. Blocking."""
