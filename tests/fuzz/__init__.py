"""Fuzzing: untrusted bytes into every parser, by hypothesis in CI and by atheris for longer."""
