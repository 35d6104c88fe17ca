"""`validate`: checks the settings against the model's own config.json, and estimates memory."""
