"""Rules for single values: engine, entry point, rolling batch, formatter, address.

A rule returns the value that counts for one setting, with warnings and errors. Rules that need the
model or the devices are in translate/rules.py.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from lmi_vllm.config import parsers as text_parsers
from lmi_vllm.config.listen import ListenAddress, is_address, read_address
from lmi_vllm.config.setting import CommandLine, Setting
from lmi_vllm.messages import FRAMINGS, LOG_LEVELS, Origin, OriginKind


@dataclass(frozen=True, slots=True)
class Verdict:
    """The value that counts, with its warning or error."""

    value: object
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


ValueRule = Callable[[Setting], Verdict]

_READ_AS_PYTHON: Final = ("MPI", "DeepSpeed", "FasterTransformer")
# LMI's other engines for text; LMI's guide uses them for text embedding.
EMBEDDING_ENGINES: Final = ("Rust", "OnnxRuntime", "PyTorch")
_BUILT_IN_HANDLERS: Final = (
    "djl_python.lmi_vllm.vllm_async_service",
    "djl_python.huggingface",
)
_OTHER_LLM_HANDLERS: Final = (
    "djl_python.deepspeed",
    "djl_python.fastertransformer",
    "djl_python.transformers_neuronx",
    "djl_python.tensorrt_llm",
)
_OTHER_HANDLERS: Final = (
    "djl_python.stable_diffusion",
    "djl_python.sklearn_handler",
    "djl_python.xgboost_handler",
    "djl_python.sagemaker",
)
_ROLLING_BATCHES: Final = ("auto", "vllm", "disable")
_OLD_ROLLING_BATCHES: Final = ("lmi-dist", "scheduler", "deepspeed", "neuron", "trtllm")


def engine(setting: Setting) -> Verdict:
    """`Python`, one of LMI's older names for it, or one of LMI's embedding engines."""
    text = str(setting.value)
    if text.lower() == "python":
        return Verdict("Python")
    older = next((name for name in _READ_AS_PYTHON if name.lower() == text.lower()), None)
    if older:
        return Verdict("Python", (f"{setting.label}: {older} is read as Python",))
    embedding = next((name for name in EMBEDDING_ENGINES if name.lower() == text.lower()), None)
    if embedding:
        sentence = (
            f"{setting.label}: {embedding} is gone; vLLM serves the model, as one that embeds "
            f"texts, classifies or ranks them (option.task says otherwise)"
        )
        return Verdict(embedding, (sentence,))
    allowed = ", ".join(("Python", *_READ_AS_PYTHON, *EMBEDDING_ENGINES))
    return Verdict(
        "Python",
        errors=(f"{setting.label}: engine {text} is not served here; allowed are {allowed}",),
    )


def entry_point(setting: Setting) -> Verdict:
    """None for the built-in handler, else a file, path or URL."""
    text = str(setting.value)
    if text in _BUILT_IN_HANDLERS:
        return Verdict(None)
    if text in _OTHER_LLM_HANDLERS or text.startswith("djl_python.lmi_trtllm."):
        return Verdict(None, (f"{setting.label}: {text} is replaced by the built-in handler",))
    if text.startswith("djl_python."):
        reason = "is not an LLM backend" if text in _OTHER_HANDLERS else "is not known"
        allowed = ", ".join(_BUILT_IN_HANDLERS)
        sentence = f"{setting.label}: {text} {reason}; leave it out or use {allowed}, or a .py file"
        return Verdict(None, errors=(sentence,))
    if text.endswith(".py") or text.startswith("/") or re.match(r"https?://", text):
        return Verdict(text)
    sentence = f"{setting.label}: {text} is no .py file, absolute path, URL or djl_python module"
    return Verdict(None, errors=(sentence,))


def rolling_batch(setting: Setting) -> Verdict:
    """Always vLLM's continuous batching; older names cause a warning."""
    text = str(setting.value).lower()
    if text in _ROLLING_BATCHES:
        return Verdict(text)
    if text in _OLD_ROLLING_BATCHES:
        return Verdict(
            "vllm", (f"{setting.label}: {text} is gone; vLLM's continuous batching is used",)
        )
    allowed = ", ".join((*_ROLLING_BATCHES, *_OLD_ROLLING_BATCHES))
    return Verdict("auto", errors=(f"{setting.label}: {text} is unknown; allowed are {allowed}",))


def output_formatter(setting: Setting) -> Verdict:
    """A formatter's name; None for formatters that no longer exist."""
    text = str(setting.value)
    if text == "none":
        return Verdict(None, (f"{setting.label}: {text} counts as unset; use json or jsonlines",))
    if text.isidentifier() or text in FRAMINGS:
        return Verdict(text)
    sentence = (
        f"{setting.label}: {text!r} is no formatter; allowed are {', '.join(FRAMINGS)} "
        f"or the name of a function in model.py"
    )
    return Verdict(None, errors=(sentence,))


def log_level(opts: str) -> str:
    """The level that options of Java's set, as SERVING_OPTS=-Dai.djl.logging.level=debug does."""
    match = re.search(r"-Dai\.djl\.logging\.level=([^\s\"']*)", opts)
    return match[1].lower() if match else "info"


def java_options(setting: Setting) -> Verdict:
    """Options of Java's, of which only the level of the log has a meaning."""
    text = str(setting.value)
    if (level := log_level(text)) in LOG_LEVELS:
        return Verdict(text)
    sentence = f"{setting.label}: level {level} is unknown; allowed are {', '.join(LOG_LEVELS)}"
    return Verdict(text, errors=(sentence,))


VALUE_RULES: Final[Mapping[str, ValueRule]] = MappingProxyType(
    {
        "engine": engine,
        "entryPoint": entry_point,
        "rolling_batch": rolling_batch,
        "output_formatter": output_formatter,
        "opts": java_options,
    }
)


_OF_TLS: Final = ("SERVING_PRIVATE_KEY_FILE", "SERVING_CERTIFICATE_FILE")


def resolve_address(
    configured: Setting,
    environ: Mapping[str, str],
    command_line: CommandLine,
    fail: Callable[[str], None],
) -> Setting:
    """The inference address, after `--host`, `--port` and SAGEMAKER_BIND_TO_PORT."""
    value = str(configured.value)
    if value.startswith("unix:"):
        asked = (command_line.host, command_line.port, environ.get("SAGEMAKER_BIND_TO_PORT"))
        is_flag = configured.origin.kind is OriginKind.FLAG  # --uds comes first, as in vLLM
        if is_flag or asked in ((None, None, None), (None, None, "")):
            return configured
        value = ""  # a platform that sets a host or port connects only there
    parsed = read_address(value)
    host, port = parsed.host, parsed.port
    scheme = "https" if command_line.vllm.is_tls else parsed.scheme
    bound = environ.get("SAGEMAKER_BIND_TO_PORT") or None
    is_whole = command_line.host is not None and (command_line.port, bound) != (None, None)
    is_read = configured.is_set and bool(value) and not is_whole
    named = {raw.key: raw.origin.name for raw in command_line.vllm.values}
    flags = [named[key] for key in _OF_TLS if key in named]
    origins = flags[:1] if scheme != parsed.scheme else []
    if command_line.host is not None:
        host = _asked_host(command_line.host, fail)
        origins.append("--host")
    if command_line.port is not None:
        port = _asked_port("--port", str(command_line.port), fail)
        origins.append("--port")
    elif environ.get("SAGEMAKER_BIND_TO_PORT"):
        origins.append("SAGEMAKER_BIND_TO_PORT")
        port = _asked_port("SAGEMAKER_BIND_TO_PORT", environ["SAGEMAKER_BIND_TO_PORT"], fail)
    address = ListenAddress(scheme, host, port).url()
    if not origins:
        return replace(configured, value=address)
    if is_read:
        origins.append(str(configured.origin))
    origin = Origin(OriginKind.FLAG, ", ".join(origins))
    return replace(configured, value=address, origin=origin)


def _asked_host(text: str, fail: Callable[[str], None]) -> str:
    host = text.strip("[]") or "127.0.0.1"
    if is_address(ListenAddress("http", host).url()):
        return host
    fail(f"--host={text} cannot be used: a host name or an IP address is needed")
    return "127.0.0.1"


def _asked_port(name: str, text: str, fail: Callable[[str], None]) -> int:
    try:
        return text_parsers.port(text)
    except ValueError as error:
        fail(f"{name}={text} cannot be used: {error}")
        return 0
