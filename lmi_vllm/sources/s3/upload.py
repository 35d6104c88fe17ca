"""Copy a small directory to S3; what is there already is written over."""

from collections.abc import Mapping
from pathlib import Path

from lmi_vllm.sources.s3.store import open_client, parse_location, request_payer, translating


def upload_directory(directory: Path, url: str, environ: Mapping[str, str]) -> int:
    """Copy every file below `directory` under the prefix and return how many.

    Raises:
        DownloadError: the store refuses, or nobody answers.
    """
    location = parse_location(url)
    client = open_client(location, environ)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    for path in files:
        key = f"{location.prefix}{path.relative_to(directory).as_posix()}"
        with translating(location, environ):
            client.put_object(
                Bucket=location.bucket,
                Key=key,
                Body=path.read_bytes(),
                **request_payer(environ),
            )
    return len(files)
