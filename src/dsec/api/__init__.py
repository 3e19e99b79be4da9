"""The stateless front door: HTTP and WebSocket on one side, calls to nodes on the other."""
