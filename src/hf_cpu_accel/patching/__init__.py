"""Changes to a user's model that can be taken back: the journal, hooks, overridden methods, and where original weights wait."""
