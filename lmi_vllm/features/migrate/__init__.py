"""`migrate`: the configuration of another server, written as ours."""
