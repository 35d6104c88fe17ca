"""The suite for a machine with a GPU: `python -m integration.gpu` (make gpu), and one report."""
