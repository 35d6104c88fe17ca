"""Fuzz for longer, guided by coverage: `python -m tests.fuzz.run --seconds 120 [target ...]`.

atheris runs each target in a process of its own, from the seeds; a crash leaves its input in
`.fuzz/<target>/` and ends with 1. It becomes a test: a line in `tests/fuzz/test_found.py`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS

ROOT = Path(".fuzz")


def fuzz(name: str, seconds: int) -> None:
    """Run one target in this process until its time is over; atheris ends the process."""
    import atheris

    corpus = ROOT / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    target = TARGETS[name]
    with atheris.instrument_imports(include=["lmi_vllm"]):
        pass
    atheris.instrument_all()
    flags = [f"-max_total_time={seconds}", f"-artifact_prefix={ROOT / name}/", "-max_len=65536"]
    atheris.Setup([name, *flags, "-timeout=20", "-rss_limit_mb=4096", str(corpus)], target)
    atheris.Fuzz()


def main() -> int:
    """Run every target asked for, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=120, help="for each target")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    given = parser.parse_args()
    if given.inside:
        fuzz(given.inside, given.seconds)
    failed = []
    for name in given.targets:
        command = [sys.executable, "-m", "tests.fuzz.run", "--inside", name]
        done = subprocess.run(
            [*command, "--seconds", str(given.seconds)], capture_output=True, text=True, check=False
        )
        last = [line for line in done.stderr.splitlines() if line.startswith(("#", "Done"))][-1:]
        print(f"{name}: {'; '.join(last)}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
