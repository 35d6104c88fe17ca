"""The OpenAPI description of the running server, and a page that shows it."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.api_docs.openapi:GROUP"),),
)
