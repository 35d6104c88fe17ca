"""Servers behind a reverse proxy, which are killed, rolled and joined by another, under load."""
