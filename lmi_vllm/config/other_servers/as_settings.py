"""Flags of `vllm serve`, and variables of other images, as texts with their origins.

They are read by the tables that `migrate` uses, so that both always say the same.
"""

import argparse
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.other_servers.one_word import several_in_one
from lmi_vllm.config.other_servers.replacement import Replacement
from lmi_vllm.config.other_servers.tgi_variables import (
    LAUNCHED,
    TGI_ONLY_NAMES,
    TGI_VARIABLES,
    pair_replacements,
)
from lmi_vllm.config.other_servers.vllm_flags import Flag, is_flag, read_flags, read_variables
from lmi_vllm.config.other_servers.vllm_server import (
    FRONT_END,
    problem_of,
    replacement_of,
)
from lmi_vllm.config.other_servers.without_meaning import (
    MODEL_NAMES,
    RESOLVER_FOLDER,
    not_written_out,
    resolves_adapters,
    unread_of_tgi,
    without_meaning,
)
from lmi_vllm.config.setting import FILE_PREFIX, OtherSettings, RawValue
from lmi_vllm.messages import Origin, OriginKind

_MODEL_ID: Final = f"{FILE_PREFIX}model_id"
_LORA_MODULES: Final = f"{FILE_PREFIX}lora_modules"
_ENABLE_LORA: Final = f"{FILE_PREFIX}enable_lora"
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
    if resolves_adapters(environ):
        found.set(f"{FILE_PREFIX}adapter_store", environ[RESOLVER_FOLDER], RESOLVER_FOLDER)
    return found.done()


def names_tgi(environ: Mapping[str, str]) -> bool:
    """Whether the variables are TGI's: a model, and one that only its launcher reads or is."""
    names = (*TGI_ONLY_NAMES, LAUNCHED)
    others = [name for name in names if name not in MODEL_NAMES and environ.get(name)]
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
    flags: Container[str] = (),
) -> OtherSettings:
    """Return what the variables of other servers' images say: SageMaker's for vLLM, and TGI's.

    TGI's are read where no other model is named (`has_model`). What is not read is unknown. `flags`
    are those of this start as they were written; they may have come out of a variable.
    """
    found = from_sagemaker(environ, options)
    unknown = [*found.unknown, *without_meaning(environ), *not_written_out(environ, flags)]
    if not names_tgi(environ) or has_model or any(raw.key == _MODEL_ID for raw in found.values):
        unknown += [
            f"{name} is of TGI's launcher and is not read here: lmi-vllm migrate --from tgi "
            "converts such variables"
            for name in unread_of_tgi(environ)
        ]
        return replace(found, unknown=tuple(unknown))
    tgi = from_tgi(environ, options)
    return OtherSettings(
        (*found.values, *tgi.values),
        (*found.errors, *tgi.errors),
        (*found.warnings, *tgi.warnings),
        tuple(unknown),
    )
