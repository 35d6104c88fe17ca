"""What only a CPU needs: on GPUs nothing of this folder is used."""
