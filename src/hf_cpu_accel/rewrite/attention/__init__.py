"""Attention modules and the attention interfaces of hosts."""
