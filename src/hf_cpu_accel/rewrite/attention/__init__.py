"""Attention modules and the hosts' attention interfaces."""
