"""What our images run: `python -m lmi_vllm.features.image`; it adds nothing to the server."""
