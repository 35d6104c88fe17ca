"""CPU seconds and memory of LoRA in one layer for a step of prompts, ours beside plain vLLM's.

    python -m integration.bench lora_step [--runs 5]

Each computation runs in a process of its own, so that its peak of memory is its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Final

from integration.bench.results import Claim, Result, Table, spread

STEPS: Final = ((1024, 16, 4096), (2048, 8, 8192), (512, 64, 4096))  # tokens, rank, width
SLOTS: Final = 2
OURS, PLAIN = "ours", "vLLM"
MOST_OF_THE_TIME, MOST_OF_THE_MEMORY = 1.0, 0.5


def compute(who: str, tokens: int, rank: int, width: int) -> None:
    """Print CPU seconds, bytes more than before and a sum over the result's bits, as JSON."""
    import resource  # noqa: PLC0415 (Linux only)

    import torch  # noqa: PLC0415 (slow, and only where it is measured)
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # noqa: PLC0415

    from lmi_vllm.engine.vllm.cpu.lora_parts import in_parts  # noqa: PLC0415

    torch.manual_seed(0)
    kind = torch.bfloat16
    slots = torch.randint(0, SLOTS, (tokens,)).sort().values
    down = torch.randn(SLOTS, 1, rank, width, dtype=kind)
    up = torch.randn(SLOTS, 1, width, rank, dtype=kind)
    inputs, output = torch.randn(tokens, width, dtype=kind), torch.zeros(tokens, width, dtype=kind)
    wrapper = in_parts(PunicaWrapperCPU) if who == OURS else PunicaWrapperCPU
    punica = wrapper(tokens, tokens, "cpu")
    punica._token_lora_indices[:] = slots
    punica.indices_len, punica.is_prefill = [tokens] * 4, True
    punica._update_prefill_metadata(slots)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    punica.add_lora_linear(output, inputs, (down,), (up,), 1.0, (width,))
    seconds = time.process_time() - began
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    bits = int(output.view(torch.int16).to(torch.int64).sum())
    print(json.dumps([seconds, more, bits]))


def measured(who: str, step: tuple[int, int, int]) -> tuple[float, int, int]:
    """Return what `compute` prints, of a process of its own."""
    call = f"from integration.bench.lora_step import compute; compute({who!r}, *{step!r})"
    text = subprocess.run([sys.executable, "-c", call], capture_output=True, check=True).stdout
    seconds, more, bits = json.loads(text.splitlines()[-1])
    return seconds, more, bits


def main() -> Result:
    """Measure both in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    rows, times, memory = [], [], []
    for step in STEPS:
        found = [(measured(OURS, step), measured(PLAIN, step)) for _ in range(runs)]
        assert len({one[2] for pair in found for one in pair}) == 1, "other numbers"
        (ours, our_bytes), (plain, plain_bytes) = (
            ([pair[side][0] for pair in found], max(pair[side][1] for pair in found))
            for side in (0, 1)
        )
        times.append(statistics.median(ours) / statistics.median(plain))
        memory.append(our_bytes / plain_bytes)
        rows.append([
            "{} tokens, rank {}, width {}".format(*step), spread(ours, 2), spread(plain, 2),
            f"{our_bytes >> 20}", f"{plain_bytes >> 20}",
        ])  # fmt: skip
    head = ["step", "CPU s", "CPU s, vLLM", "MiB", "MiB, vLLM"]
    claims = [
        Claim("CPU of LoRA in a step of prompts, ours / vLLM", max(times), MOST_OF_THE_TIME),
        Claim("its memory, ours / vLLM", max(memory), MOST_OF_THE_MEMORY),
    ]
    return Result([Table("LoRA of one layer in a step of prompts", head, rows)], claims)
