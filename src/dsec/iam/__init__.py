"""Who may ask: projects, principals, grants, tokens, quotas and policies."""
