"""Where what vLLM compiles is kept."""

from collections.abc import Iterator

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import ExtraSettings


class CompileCacheSettings(ExtraSettings):
    """The folder or prefix that the cache is read from and written to."""

    # fmt: off
    lmi_cache_uri: str | None = variable(parse.folder_or_s3, "Folder or S3 prefix that keeps "
        "what vLLM compiles between containers: restored before the engine starts, saved once it "
        "is ready. It holds code: refused in secure mode, and where everybody may write the "
        "folder.", values="path or S3 URL")
    # fmt: on

    def forbidden_in_secure_mode(self) -> Iterator[str]:
        """Yield the refusal: who can write there decides what the engine runs."""
        if self.lmi_cache_uri:
            yield "LMI_CACHE_URI is not allowed in secure mode: compiled code is read from there"
