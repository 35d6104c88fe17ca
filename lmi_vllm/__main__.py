"""`python -m lmi_vllm` is the same program as the console script `lmi-vllm`."""

from lmi_vllm.cli import main

if __name__ == "__main__":
    main()
