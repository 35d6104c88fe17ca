"""vLLM's own benchmark client, by its module: the `vllm` command needs a package of that name.

    python -m integration.bench.vllm_client --base-url http://127.0.0.1:8080 ...

Takes the flags of `vllm bench serve`.
"""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
