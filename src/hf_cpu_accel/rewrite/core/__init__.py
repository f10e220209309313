"""What all rooms share: the rule's interface, matching, refusals, verification, traces."""
