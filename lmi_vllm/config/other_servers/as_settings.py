"""Flags of `vllm serve`, and variables of other images, as texts with their origins.

They are read by the tables that `migrate` uses, so that both always say the same.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options import ALIAS_VARIABLES
from lmi_vllm.config.other_servers.nim_variables import NIM_PREFIX, advice_for
from lmi_vllm.config.other_servers.one_word import several_in_one
from lmi_vllm.config.other_servers.replacement import Replacement
from lmi_vllm.config.other_servers.tgi_variables import (
    LAUNCHED,
    TGI_ONLY_NAMES,
    TGI_PAIRS,
    TGI_VARIABLES,
    pair_replacements,
)
from lmi_vllm.config.other_servers.vllm_flags import Flag, is_flag, read_flags, read_variables
from lmi_vllm.config.other_servers.vllm_server import (
    ARGUMENTS_OF_CHARTS,
    FRONT_END,
    problem_of,
    replacement_of,
)
from lmi_vllm.config.setting import FILE_PREFIX, OtherSettings, RawValue
from lmi_vllm.messages import Origin, OriginKind

# Names that other launchers read, too.
_MODEL_NAMES: Final = ("MODEL_ID", "HF_MODEL_ID")
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
_RESOLVER_FOLDER: Final = "VLLM_LORA_RESOLVER_CACHE_DIR"
_RESOLVER_SWITCH: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_RESOLVER: Final = "lora_filesystem_resolver"
_MODEL_ID: Final = f"{FILE_PREFIX}model_id"
_LORA_MODULES: Final = f"{FILE_PREFIX}lora_modules"
_ENABLE_LORA: Final = f"{FILE_PREFIX}enable_lora"
_NO_FLAGS: Final = OtherSettings()
VLLM_DEFAULT: Final = Origin(OriginKind.FLAG, "a default of vllm serve")
# Where a setting is left out: ours listens elsewhere and takes all GPUs. Its own name for the model
# is replaced once it is known which one is named (`model_sources`).
_VLLM_DEFAULTS: Final = (
    RawValue("SERVING_INFERENCE_ADDRESS", "http://0.0.0.0:8000", VLLM_DEFAULT),
    RawValue(f"{FILE_PREFIX}tensor_parallel_size", "1", VLLM_DEFAULT),
    RawValue(f"{FILE_PREFIX}data_parallel_size", "1", VLLM_DEFAULT),
)


@dataclass(slots=True)
class _Found:
    """What has been read so far."""

    kind: OriginKind
    options: OptionTable
    values: list[RawValue] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add_flag(self, flag: Flag, flags: Sequence[Flag]) -> None:
        """Add one argument of vLLM's."""
        if flag.is_unknown and self.kind is OriginKind.VARIABLE:
            self.unknown.append(f"{flag.written} is not known and has no effect: {flag.problem}")
        elif flag.problem:
            self.errors.append(f"{flag.source}: {problem_of(flag, self.options)}")
        else:
            self.add(replacement_of(flag, flags, self.options), flag.source, flag.written)

    def add(self, replacement: Replacement, source: str, written: str) -> None:
        """Add one setting by what it is here."""
        if replacement.is_refused:
            self.errors.append(f"{source} is not possible here: {replacement.why}")
        elif replacement.key is None:
            self.warnings.append(f"{source} has no effect: {replacement.why}")
        else:
            self.set(replacement.key, replacement.text, written)
            if replacement.why:
                self.warnings.append(f"{source} becomes {replacement.key}: {replacement.why}")

    def set(self, key: str, text: str, written: str) -> None:
        """Set an option, a key of serving.properties, or a variable of ours."""
        for earlier in self.values:
            if (earlier.key, earlier.text) == (key, text):  # --host and --port
                self.values.remove(earlier)
                written = f"{earlier.origin.name}, {written}"
                break
        self.values.append(RawValue(key, text, Origin(self.kind, written)))

    def done(self) -> OtherSettings:
        """Return all of it; adapters of the start need LoRA, and switch it on where it is unset."""
        keys = {raw.key: raw for raw in self.values}
        if (named := keys.get(_LORA_MODULES)) is not None and _ENABLE_LORA not in keys:
            self.set(_ENABLE_LORA, "true", named.origin.name)
        return OtherSettings(
            tuple(self.values), tuple(self.errors), tuple(self.warnings), tuple(self.unknown)
        )


def split_words(
    words: Sequence[str], own: Mapping[str, argparse.Action]
) -> tuple[list[str], list[str]]:
    """Return the words of our own flags, by argparse's actions, and those for vLLM's parser."""
    ours: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        is_one = is_flag(word) and not several_in_one(word)
        action = own.get(word.partition("=")[0]) if is_one else None
        if action is None:
            rest.append(word)
            continue
        ours.append(word)
        if action.nargs is None and "=" not in word and queue:
            ours.append(queue.pop(0))
    return ours, rest


def from_flags(
    words: Sequence[str], options: OptionTable, *, is_vllm: bool = False
) -> OtherSettings:
    """Return what the flags of `vllm serve` are here.

    With `is_vllm` the command was vLLM's own: what it does not say is as vLLM's defaults are.
    """
    found, flags = _Found(OriginKind.FLAG, options), read_flags(words)
    for flag in flags:
        found.add_flag(flag, flags)
    names = {flag.name: flag for flag in flags}
    is_tls = bool(names.keys() & {"ssl_keyfile", "ssl_certfile"})
    return replace(found.done(), is_tls=is_tls, defaults=_VLLM_DEFAULTS if is_vllm else ())


def variables_of_flags(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of this server that flags of vLLM's HTTP server stand for."""
    flags = [flag for flag in read_flags(words) if flag.name in FRONT_END and not flag.problem]
    found = [FRONT_END[flag.name](flag.text) for flag in flags]
    return {one.key: one.text for one in found if one.key is not None and one.key.isupper()}


def from_sagemaker(environ: Mapping[str, str], options: OptionTable) -> OtherSettings:
    """Return what the variables of vLLM's images are here.

    `SM_VLLM_*` are AWS's and Hugging Face's; their scripts read no others. The folder of vLLM's
    resolver of adapters is a store of adapters.
    """
    found, flags = _Found(OriginKind.VARIABLE, options), read_variables(environ)
    for flag in flags:
        found.add_flag(flag, flags)
    if _resolves_adapters(environ):
        found.set(f"{FILE_PREFIX}adapter_store", environ[_RESOLVER_FOLDER], _RESOLVER_FOLDER)
    return found.done()


def _resolves_adapters(environ: Mapping[str, str]) -> bool:
    """Whether vLLM would load adapters from its resolver's folder."""
    plugins = environ.get("VLLM_PLUGINS")
    is_on = environ.get(_RESOLVER_SWITCH, "").strip().lower() in ("1", "true")
    is_loaded = plugins is None or _RESOLVER in plugins.split(",")
    return bool(environ.get(_RESOLVER_FOLDER)) and is_on and is_loaded


def names_tgi(environ: Mapping[str, str]) -> bool:
    """Whether the variables are TGI's: a model, and one that only its launcher reads or is."""
    names = (*TGI_ONLY_NAMES, LAUNCHED)
    others = [name for name in names if name not in _MODEL_NAMES and environ.get(name)]
    return bool(environ.get("MODEL_ID")) and bool(others)


def from_tgi(environ: Mapping[str, str], options: OptionTable) -> OtherSettings:
    """Return what the variables of TGI's launcher are here; its schema of answers included."""
    found = _Found(OriginKind.VARIABLE, options)
    for name, text in environ.items():
        convert = TGI_VARIABLES.get(name)
        if convert is None or not text or name == "HF_MODEL_ID":
            continue
        try:
            found.add(convert(text), name, name)
        except ValueError as error:
            found.errors.append(f"{name}={text} cannot be used: {error}")
    for source, replacement in pair_replacements(environ):
        found.add(replacement, source, source.partition("=")[0])
    if environ.get("CUDA_GRAPHS") and environ.get("ENABLE_CUDA_GRAPHS"):
        older = f"ENABLE_CUDA_GRAPHS={environ['ENABLE_CUDA_GRAPHS']}"
        found.warnings.append(f"{older} has no effect: CUDA_GRAPHS counts, only older TGI reads it")
    found.set(f"{FILE_PREFIX}tgi_compat", "true", "MODEL_ID")
    if not environ.get("MAX_CONCURRENT_REQUESTS"):
        found.set("job_queue_size", "128", "TGI's default")
    return found.done()


def of_images(
    environ: Mapping[str, str],
    options: OptionTable,
    *,
    has_model: bool,
    flags: OtherSettings = _NO_FLAGS,
) -> OtherSettings:
    """Return what the variables of other servers' images say: SageMaker's for vLLM, and TGI's.

    TGI's are read where no other model is named (`has_model`). What is not read is unknown. `flags`
    are those of this start, which may have come out of a variable.
    """
    found = from_sagemaker(environ, options)
    unknown = [*found.unknown, *_without_meaning(environ), *_not_on_the_line(environ, flags)]
    if not names_tgi(environ) or has_model or any(raw.key == _MODEL_ID for raw in found.values):
        unknown += [
            f"{name} is of TGI's launcher and is not read here: lmi-vllm migrate --from tgi "
            "converts such variables"
            for name in _unread_of_tgi(environ)
        ]
        return replace(found, unknown=tuple(unknown))
    tgi = from_tgi(environ, options)
    return OtherSettings(
        (*found.values, *tgi.values),
        (*found.errors, *tgi.errors),
        (*found.warnings, *tgi.warnings),
        tuple(unknown),
    )


def _unread_of_tgi(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of TGI's launcher that have no meaning here.

    Names that other programs have, too (`DTYPE`, `PORT`), are TGI's beside one that only TGI has.
    """
    given = [name for name in TGI_ONLY_NAMES if environ.get(name)]
    if all(name in _MODEL_NAMES for name in given):
        return given
    aliases = {alias.source for alias in ALIAS_VARIABLES}
    shared = (
        name
        for name in (*TGI_VARIABLES, *TGI_PAIRS)
        if environ.get(name) and name not in (*given, *aliases, *_MODEL_NAMES, *_OF_NO_PROGRAM)
    )
    return [*given, *shared]


def _not_on_the_line(environ: Mapping[str, str], flags: OtherSettings) -> Iterator[str]:
    """Yield a sentence for each variable whose flags no start script has written out."""
    written = {raw.origin.name for raw in flags.values}
    for name in ARGUMENTS_OF_CHARTS:
        words = [word.partition("=")[0] for word in environ.get(name, "").split()]
        if words and written.isdisjoint(words):
            yield (
                f"{name} has no effect by itself: a start script has to write it into the command "
                "line; the same flags may follow `lmi-vllm serve`"
            )


def _without_meaning(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable of a launcher that has no counterpart by its name."""
    for name, text in environ.items():
        if name == _RESOLVER_FOLDER and _resolves_adapters(environ):
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
