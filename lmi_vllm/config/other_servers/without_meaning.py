"""Variables of other servers' launchers that nothing here reads, and what says the same."""

from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.options import ALIAS_VARIABLES
from lmi_vllm.config.other_servers.nim_variables import NIM_PREFIX, advice_for
from lmi_vllm.config.other_servers.tgi_variables import TGI_ONLY_NAMES, TGI_PAIRS, TGI_VARIABLES
from lmi_vllm.config.other_servers.vllm_server import ARGUMENTS_OF_CHARTS

# Names that other launchers read, too.
MODEL_NAMES: Final = ("MODEL_ID", "HF_MODEL_ID")
_OF_NO_PROGRAM: Final = ("HOSTNAME", "MASTER_ADDR", "MASTER_PORT")  # of shells, and of torch
_OTHER_PREFIXES: Final = MappingProxyType(
    {
        "SM_SGLANG_": "it is for SGLang's image; engine arguments here are OPTION_<NAME> or flags",
        "VLLM_LORA_RESOLVER_": "adapters on demand: option.adapter_store (docs/adapter-store.md)",
    }
)
# Variables of Hugging Face's image of vLLM, and what says the same here. Its other names with these
# prefixes are read by libraries, such as HF_ENABLE_PARALLEL_LOADING by transformers.
_OF_HUGGING_FACE: Final = MappingProxyType(
    {
        "HF_ENABLE_EXPANDABLE_SEGMENTS": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "HF_ENABLE_LMCACHE": "set OPTION_LMCACHE_AUTO_CONFIG=true",
        "HF_ENABLE_OPTIMIZATIONS": "each of them has a setting of its own here",
        "HF_ENABLE_RUNAI_STREAMER": "set OPTION_LOAD_FORMAT=runai_streamer",
        "HF_ENABLE_TOKENIZERS_GUARD": "set TOKENIZERS_PARALLELISM=false",
        "HF_ENABLE_XET_HIGH_PERFORMANCE": "set HF_XET_HIGH_PERFORMANCE=1",
        "HF_LMCACHE_CPU_FRACTION": "set LMCACHE_MAX_LOCAL_CPU_SIZE, in GB",
        "HF_LMCACHE_KV_CONFIG": "set OPTION_KV_TRANSFER_CONFIG",
    }
)
# Variables that vLLM's own HTTP server reads, and this one does not.
_OF_VLLM_SERVER: Final = MappingProxyType(
    {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "idle connections stay open for 630 s",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "set SERVING_HEALTH_CHECK_OVERRIDE=true",
        "VLLM_LOG_STATS_INTERVAL": "set LMI_STATS_INTERVAL",
        "VLLM_USE_RUST_FRONTEND": "this server is the front end",
    }
)
_OFF: Final = ("", "0", "false")
# vLLM's plug-in that loads an adapter from the folder of its name, and what switches it on.
RESOLVER_FOLDER: Final = "VLLM_LORA_RESOLVER_CACHE_DIR"
_RESOLVER_SWITCH: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_RESOLVER: Final = "lora_filesystem_resolver"


def resolves_adapters(environ: Mapping[str, str]) -> bool:
    """Whether vLLM would load adapters from its resolver's folder."""
    plugins = environ.get("VLLM_PLUGINS")
    is_on = environ.get(_RESOLVER_SWITCH, "").strip().lower() in ("1", "true")
    is_loaded = plugins is None or _RESOLVER in plugins.split(",")
    return bool(environ.get(RESOLVER_FOLDER)) and is_on and is_loaded


def unread_of_tgi(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of TGI's launcher that have no meaning here.

    Names that other programs have, too (`DTYPE`, `PORT`), are TGI's beside one that only TGI has.
    """
    given = [name for name in TGI_ONLY_NAMES if environ.get(name)]
    if all(name in MODEL_NAMES for name in given):
        return given
    aliases = {alias.source for alias in ALIAS_VARIABLES}
    shared = (
        name
        for name in (*TGI_VARIABLES, *TGI_PAIRS)
        if environ.get(name) and name not in (*given, *aliases, *MODEL_NAMES, *_OF_NO_PROGRAM)
    )
    return [*given, *shared]


def not_written_out(environ: Mapping[str, str], flags: Container[str]) -> Iterator[str]:
    """Yield a sentence for each variable of which no start script has written out the flags."""
    for name in ARGUMENTS_OF_CHARTS:
        words = [word.partition("=")[0] for word in environ.get(name, "").split()]
        if words and not any(word in flags for word in words):
            yield (
                f"{name} has no effect by itself: a start script has to write it into the command "
                "line; the same flags may follow `lmi-vllm serve`"
            )


def without_meaning(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable of a launcher that has no counterpart by its name."""
    for name, text in environ.items():
        if name == RESOLVER_FOLDER and resolves_adapters(environ):
            continue
        if name in _OF_HUGGING_FACE and text.strip().lower() not in _OFF:
            advice = _OF_HUGGING_FACE[name]
            yield f"{name} has no effect: it is for Hugging Face's image of vLLM; {advice}"
        if name in _OF_VLLM_SERVER and text:
            yield f"{name} has no effect: {_OF_VLLM_SERVER[name]}"
        if name.startswith(NIM_PREFIX):
            yield f"{name} has no effect: {advice_for(name)}"
        for prefix, advice in _OTHER_PREFIXES.items():
            if name.startswith(prefix):
                yield f"{name} has no effect: {advice}"
