"""Reversible changes to a user's model: the journal, hooks, overridden methods, and storage of original weights."""
