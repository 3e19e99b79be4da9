"""In a cluster: shared state on NATS with JetStream."""
