"""Who may ask: projects, principals, tokens."""
