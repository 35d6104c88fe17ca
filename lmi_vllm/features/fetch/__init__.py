"""`fetch`: the server's own download as a verb, for images and init containers."""
