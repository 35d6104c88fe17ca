"""For Ray Serve: `serve run lmi_vllm.ray:app HF_MODEL_ID=…`; docs/scale-out.md describes it.

`app` builds the application. `middlewares` is for Ray's proxies, which then know the adapter of a
request: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=lmi_vllm.ray:middlewares`.
"""

from lmi_vllm.features.ray_serve.adapters import middlewares
from lmi_vllm.features.ray_serve.deployment import app

__all__ = ["app", "middlewares"]
