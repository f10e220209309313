"""Shared parts of the rules and stages: the rule interface, matching, refusals, verification and traces."""
