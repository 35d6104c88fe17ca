"""The server in the replicas of a Ray Serve deployment (`lmi_vllm.ray:app`)."""
