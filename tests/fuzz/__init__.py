"""Fuzzing: bytes of strangers into every parser, by hypothesis in CI and by atheris for longer."""
