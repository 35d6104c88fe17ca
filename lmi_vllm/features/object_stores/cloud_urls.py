"""URLs of Google Cloud Storage and Azure Blob Storage, in the forms that people write."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores.location import Location

# Only Azure's own hosts: credentials are sent there.
_AZURE_HOST: Final = (
    r"(?P<account>[a-z0-9]{3,24})\.(?:blob|dfs)\."
    r"(?P<cloud>core\.(?:windows\.net|usgovcloudapi\.net|chinacloudapi\.cn))"
)
_AZURE_FORMS: Final = tuple(
    re.compile(form)
    for form in (
        r"(?P<root>az://(?P<bucket>[^/@]*))(?:/(?P<key>.*))?",
        rf"(?P<root>abfss?://(?P<bucket>[^/@]+)@{_AZURE_HOST})(?:/(?P<key>.*))?",
        rf"(?P<root>https://{_AZURE_HOST}/(?P<bucket>[^/@]+))(?:/(?P<key>.*))?",
    )
)
_AZURE_URLS: Final = re.compile(
    rf"(?:az|abfss?|azure|wasbs?|adl)://|https?://{_AZURE_HOST}(?:[:/?]|$)", re.IGNORECASE
)
_AZURE_WAYS: Final = (
    "write az://container/path with AZURE_STORAGE_ACCOUNT_NAME, "
    "abfss://container@account.dfs.core.windows.net/path or "
    "https://account.blob.core.windows.net/container/path"
)


@dataclass(frozen=True, slots=True)
class CloudPlace:
    """What a URL names; `account` and `cloud` (the end of its hosts) where it says them."""

    location: Location
    account: str = ""
    cloud: str = "core.windows.net"


@dataclass(frozen=True, slots=True)
class CloudUrls:
    """The URLs of one provider."""

    claimed: re.Pattern[str]
    forms: tuple[re.Pattern[str], ...]
    ways: str  # what to write instead of any other form
    token: str = ""  # the variable of what may be in a query, which is never read

    def problem(self, url: str) -> str:
        """Why the URL cannot be read on this machine; empty if it can."""
        if find_spec("obstore") is None:
            return f"{mask_urls(url)} needs the package obstore: pip install obstore"
        try:
            self.parse(url)
        except DownloadError as error:
            return str(error)
        return ""

    def parse(self, url: str) -> CloudPlace:
        """What the URL names.

        Raises:
            DownloadError: it is written in another way, has a query, or names no bucket.
        """
        head, _, query = url.partition("?")
        if query and self.token and "=" in query:
            raise DownloadError(
                f"{mask_urls(head)}?*** has a query, which may be secret and is never read: set "
                f"{self.token} instead"
            )
        match = next(filter(None, (form.fullmatch(url) for form in self.forms)), None)
        if match is None:
            raise DownloadError(f"{mask_urls(url)!r} is not read: {self.ways}")
        parts = {name: text or "" for name, text in match.groupdict().items()}
        location = Location.of(url, parts["bucket"], f"{parts['root']}/", parts["key"])
        account = parts.get("account")
        return CloudPlace(location, account, parts["cloud"]) if account else CloudPlace(location)


GCS_URLS: Final = CloudUrls(
    re.compile(r"(?:gs|gcs)://", re.IGNORECASE),
    (re.compile(r"(?P<root>gs://(?P<bucket>[^/@]*))(?:/(?P<key>.*))?"),),
    "write gs://bucket/path",
)
AZURE_URLS: Final = CloudUrls(_AZURE_URLS, _AZURE_FORMS, _AZURE_WAYS, "AZURE_STORAGE_SAS_TOKEN")
