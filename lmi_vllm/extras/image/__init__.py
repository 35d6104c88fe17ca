"""What our images run: `python -m lmi_vllm.extras.image`; it adds nothing to the server."""
