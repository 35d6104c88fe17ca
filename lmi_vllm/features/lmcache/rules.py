"""LMCache and KV transfer: their options, whether the package is there, what excludes what."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import computes, option, ours
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.translate.draft import ArgumentDraft
from lmi_vllm.translate.parallel import worker_cap

PACKAGE: Final = "lmcache"
_NIXL: Final = ("nixl", "nixl_rocm")


class LmcacheSettings(FeatureSettings):
    """KV caches outside of the engine."""

    section: ClassVar[str] = "LMCache and KV transfer"

    # fmt: off
    kv_transfer_config: dict[str, object] | None = option(parse.as_vllm,
        computes("kv_transfer_config"), values="JSON", note="KV connector; kv_role is mandatory.")
    lmcache_config_file: str | None = option(parse.plain_text, ours(), values="path",
        note="Exported as LMCACHE_CONFIG_FILE; relative to the model directory.")
    lmcache_auto_config: bool = option(parse.boolean, computes("kv_transfer_config"), default=False,
        note="Size LMCache from the machine's memory and disk.")
    # fmt: on


def kv_transfer(draft: ArgumentDraft) -> None:
    """Put the KV connector; refuse options that exclude LMCache's automatic sizes."""
    asked = draft.settings.feature(LmcacheSettings)
    config, said = asked.kv_transfer_config, asked.details
    if config is not None:
        draft.put("kv_transfer_config", config, said.kv_transfer_config.origin)
        if not config.get("kv_role"):
            draft.fail(
                f"{said.kv_transfer_config.label} lacks kv_role; allowed are kv_producer, "
                f"kv_consumer and kv_both",
                said.kv_transfer_config,
            )
    if not asked.lmcache_auto_config:
        return
    auto = said.lmcache_auto_config
    draft.takes_copies = False  # the automatic sizes are for one copy
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    draft.put_if_unset("kv_transfer_config", connector, auto.origin)
    experts = draft.settings.model.details.enable_expert_parallel
    if asked.lmcache_config_file is not None:
        file = said.lmcache_config_file
        draft.fail(f"{auto.label} and {file.label} exclude each other: set one of them", auto, file)
    if experts.value is True:
        draft.fail(
            f"{auto.label} and {experts.label} exclude each other: set one of them", auto, experts
        )


def check_workers(draft: ArgumentDraft) -> None:
    """Refuse several copies with LMCache's automatic sizes, which are for one."""
    asked, (cap, label) = draft.settings.feature(LmcacheSettings), worker_cap(draft)
    if asked.lmcache_auto_config and cap > 1:
        auto = asked.details.lmcache_auto_config
        draft.fail(f"{auto.label} allows one copy and {label} is {cap}", auto)


def check_package(draft: ArgumentDraft) -> None:
    """Refuse LMCache and NIXL where vLLM would not find them; say what is not for a CPU."""
    config = draft.settings.feature(LmcacheSettings).kv_transfer_config
    if any(name.startswith("Nixl") for name in connectors(config)) and not any(
        is_installed(package) for package in _NIXL
    ):
        said = draft.settings.feature(LmcacheSettings).details.kv_transfer_config
        sentence = f"{said.label} needs the package nixl: pip install nixl"
        (draft.fail if is_installed("vllm") else draft.warn)(sentence, said)
    asked = _asked(draft)
    if asked is None:
        return
    if not is_installed(PACKAGE):
        sentence = (
            f'{asked.label} needs the package lmcache: pip install "lmi-vllm[lmcache]" (the CUDA '
            f"image has it)"
        )
        # Where vLLM is not installed either, another machine is to serve.
        (draft.fail if is_installed("vllm") else draft.warn)(sentence, asked)
    if draft.devices.gpu_count == 0:
        draft.warn(
            f"{asked.label}: LMCache has no connector for a CPU; nothing is kept, and prompts "
            f"wait for look-ups that fail",
            asked,
        )


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return find_spec(package) is not None


def _asked(draft: ArgumentDraft) -> Setting | None:
    """Return the option that asks for LMCache; None without one."""
    asked = draft.settings.feature(LmcacheSettings)
    said = asked.details
    for setting in (said.lmcache_config_file, said.lmcache_auto_config):
        if setting.is_set and setting.value not in (None, False):
            return setting
    return said.kv_transfer_config if _is_lmcache(asked.kv_transfer_config) else None


def _is_lmcache(config: object) -> bool:
    return any(name.startswith("LMCache") for name in connectors(config))


def connectors(config: object) -> Iterator[str]:
    """Yield the name of the connector, and of those that it joins."""
    if not isinstance(config, Mapping):
        return
    if isinstance(name := config.get("kv_connector"), str):
        yield name
    extra = config.get("kv_connector_extra_config")
    joined = extra.get("connectors") if isinstance(extra, Mapping) else None
    for one in joined if isinstance(joined, list) else ():
        yield from connectors(one)
