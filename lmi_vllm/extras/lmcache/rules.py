"""LMCache is asked for: its package must be here, and a GPU, before the model is fetched."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from lmi_vllm.translate.draft import ArgumentDraft

PACKAGE: Final = "lmcache"
_OPTIONS: Final = ("lmcache_config_file", "lmcache_auto_config", "kv_transfer_config")


def check_package(draft: ArgumentDraft) -> None:
    """Refuse LMCache where vLLM would not find it; say what it cannot do without a GPU."""
    asked = _asked(draft)
    if not asked:
        return
    if not is_installed(PACKAGE):
        sentence = (
            f'{asked} needs the package lmcache: pip install "lmi-vllm[lmcache]" (the CUDA image '
            f"has it)"
        )
        # Where vLLM is not installed either, another machine is to serve.
        (draft.fail if is_installed("vllm") else draft.warn)(sentence)
    if draft.devices.gpu_count == 0:
        draft.warn(
            f"{asked}: LMCache has no connector for a CPU; nothing is kept, and prompts wait for "
            f"look-ups that fail"
        )


def is_installed(package: str) -> bool:
    """Whether it can be imported here; it is not."""
    return find_spec(package) is not None


def _asked(draft: ArgumentDraft) -> str:
    """The option that asks for LMCache; empty without one."""
    for name in _OPTIONS:
        setting = draft.given(name)
        if setting is None or setting.value in (None, False):
            continue
        if name != "kv_transfer_config" or _is_lmcache(setting.value):
            return setting.label
    return ""


def _is_lmcache(config: object) -> bool:
    connector = config.get("kv_connector") if isinstance(config, Mapping) else None
    return isinstance(connector, str) and connector.startswith("LMCache")
