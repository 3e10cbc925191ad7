"""Clients of the other services."""
