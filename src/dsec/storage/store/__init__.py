"""Where layers are published, and loaded from on demand. `docs/internals/store.md` has the layout."""
