"""Cache entries in S3: one PUT for each, seen whole or not at all, which leaves no parts behind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.extras.compile_cache.archive import LIMITS, ForeignEntryError
from lmi_vllm.sources.s3.store import (
    is_missing,
    open_client,
    parse_location,
    request_payer,
    translating,
)


class S3CacheStore:
    """Entries below an s3:// prefix."""

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self._location = parse_location(url)
        self._environ = environ

    @property
    def shown(self) -> str:
        """The prefix without a login."""
        return mask_urls(self._location.url)

    def fetch(self, name: str, scratch: Path) -> Path | None:
        """Fetch the entry into `scratch`."""
        client = open_client(self._location, self._environ)
        size = self._size(client, name)
        if size is None:
            return None
        if size > LIMITS.total_bytes:
            raise ForeignEntryError("it is larger than an entry may be")
        path = scratch / name
        with translating(self._location, self._environ):
            client.download_file(
                self._location.bucket, self._key(name), str(path), request_payer(self._environ)
            )
        return path

    def has(self, name: str) -> bool:
        """Whether the entry is there."""
        return self._size(open_client(self._location, self._environ), name) is not None

    def put(self, name: str, archive: Path) -> None:
        """Upload it at once."""
        client = open_client(self._location, self._environ)
        with archive.open("rb") as body, translating(self._location, self._environ):
            client.put_object(
                Bucket=self._location.bucket,
                Key=self._key(name),
                Body=body,
                **request_payer(self._environ),
            )

    def _key(self, name: str) -> str:
        return f"{self._location.prefix}{name}"

    def _size(self, client: Any, name: str) -> int | None:
        with translating(self._location, self._environ):
            try:
                head = client.head_object(
                    Bucket=self._location.bucket,
                    Key=self._key(name),
                    **request_payer(self._environ),
                )
            except client.exceptions.ClientError as error:
                if is_missing(error.response):
                    return None
                raise
        return int(head["ContentLength"])
