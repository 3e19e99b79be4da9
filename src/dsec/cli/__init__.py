"""The `dsec` command, on top of the SDK. Data goes to stdout, talk to stderr."""
