"""Passes over the captured program of a layer: each states one fact from its data flow."""
