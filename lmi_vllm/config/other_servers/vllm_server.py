"""What the arguments of `vllm serve` are here: options, server settings, or nothing to set."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options.row import EffectWord
from lmi_vllm.config.other_servers.replacement import (
    Converter,
    Replacement,
    not_needed,
    refused,
    same_in_variable,
    variable,
)
from lmi_vllm.config.other_servers.vllm_flags import Flag
from lmi_vllm.config.parsers import words
from lmi_vllm.config.variable_names import SAGEMAKER_PREFIX
from lmi_vllm.config.vllm_schema import load_release

# Variables of charts, whose start scripts write them into the command line of `vllm serve`.
ARGUMENTS_OF_CHARTS: Final = ("VLLM_ADDITIONAL_ARGS", "VLLM_ARGS", "VLLM_EXTRA_ARGS")
_NO_CLIENT_CERTIFICATES: Final = "client certificates are not checked; put a proxy in front"


def _cors(name: str) -> Converter:
    """Convert what other sites may do, which vLLM takes as JSON lists."""
    return lambda text: variable(f"SERVING_CORS_ALLOWED_{name}", ",".join(words(text)))


def _credentials(text: str) -> Replacement:
    """Refuse cookies of other sites; not to allow them is what this server does."""
    if text.lower() in ("false", "no", "0"):
        return Replacement(None, why="it is the default here")
    return refused("pages of other sites send no cookies here; send a key")(text)


def _api_key(text: str) -> Replacement:
    """Convert the keys, of which each opens the server."""
    keys = words(text)
    if not keys or not all(keys):
        return refused("a key is needed: an empty one would open the server")(text)
    return variable("LMI_API_KEY", "\n".join(keys))


def _client_certificates(text: str) -> Replacement:
    """Refuse to ask for clients' certificates; not to ask is what this server does."""
    if text.strip() == "0":
        return Replacement(None, why="it is the default here")
    return refused(_NO_CLIENT_CERTIFICATES)(text)


FRONT_END: Final[Mapping[str, Converter]] = MappingProxyType(
    {
        "api_key": _api_key,
        "api_server_count": same_in_variable("LMI_FRONTEND_PROCESSES"),
        "allowed_origins": _cors("ORIGIN"),
        "allowed_methods": _cors("METHODS"),
        "allowed_headers": _cors("HEADERS"),
        "allow_credentials": _credentials,
        "uds": lambda path: variable("SERVING_INFERENCE_ADDRESS", f"unix:{path}"),
        "enable_ssl_refresh": not_needed("renewed certificates are always read again"),
        "disable_fastapi_docs": not_needed("/docs are plain files of this server"),
        "ssl_keyfile": same_in_variable("SERVING_PRIVATE_KEY_FILE"),
        "ssl_certfile": same_in_variable("SERVING_CERTIFICATE_FILE"),
        "tool_server": refused("tool servers are not supported"),
        "headless": refused("one process serves one node; a node that follows has --node-rank"),
        "grpc": refused("there is no gRPC server"),
        "ssl_ca_certs": refused(_NO_CLIENT_CERTIFICATES),
        "ssl_cert_reqs": _client_certificates,
        "ssl_ciphers": refused("OpenSSL's configuration decides; put a proxy in front"),
    }
)
_SERVER_SETTINGS: Final = MappingProxyType({"shutdown_timeout": "SERVING_SHUTDOWN_TIMEOUT"})
_OPTIONS: Final = MappingProxyType({"model": "model_id"})
_FOLLOWS: Final = not_needed("a node with a number above 0 answers no requests anyway")
_OTHER: Final = not_needed("it belongs to vLLM's own HTTP server, which this server replaces")


def replacement_of(flag: Flag, flags: Sequence[Flag], options: OptionTable) -> Replacement:
    """Return what one flag of vLLM becomes."""
    if flag.problem:
        return Replacement(None, why=problem_of(flag, options), is_refused=True)
    if flag.name in FRONT_END:
        is_said_by_rank = flag.name == "headless" and _is_follower(flags)
        return (_FOLLOWS if is_said_by_rank else FRONT_END[flag.name])(flag.text)
    if flag.name in _SERVER_SETTINGS:  # vLLM's engine has it, and here the server does it
        return variable(_SERVER_SETTINGS[flag.name], flag.text)
    if flag.name in ("host", "port"):
        return variable("SERVING_INFERENCE_ADDRESS", vllm_address(flags))
    if flag.is_engine or options.find(flag.name) is not None:
        return Replacement(f"option.{_OPTIONS.get(flag.name, flag.name)}", flag.text)
    return _OTHER(flag.text)


def _is_follower(flags: Sequence[Flag]) -> bool:
    """Whether the command is of one of several nodes that is not the leader."""
    given = {flag.name: flag.text for flag in flags}
    return given.get("nnodes", "1") != "1" and given.get("node_rank", "0") != "0"


def problem_of(flag: Flag, options: OptionTable) -> str:
    """Return why a flag cannot be used; one that vLLM lacks may be an option of this server's."""
    if not flag.is_unknown or (row := options.find(flag.name)) is None:
        return flag.problem
    no_flag = f"vLLM {load_release().release} has no such flag"
    if row.effect.word in (EffectWord.WARNS, EffectWord.NONE):  # advice without any effect
        return f"{no_flag}; leave it out: {row.effect.text}"
    if row.name == "model_id":
        return f"{no_flag}; name the model by --model, or as the first word"
    return (
        f"{no_flag}; option.{row.name} is this server's own: "
        f"set OPTION_{row.name.upper()}, or write it into serving.properties"
    )


def vllm_address(flags: Sequence[Flag]) -> str:
    """Return where `vllm serve` listens: its socket, or a URL, https with a key or certificate.

    The scripts that read `SM_VLLM_*` give it the port of SageMaker, 8080.
    """
    given = {flag.name: flag.text for flag in flags}
    if "uds" in given:
        return f"unix:{given['uds']}"
    scheme = "https" if given.keys() & {"ssl_keyfile", "ssl_certfile"} else "http"
    host = given.get("host") or "0.0.0.0"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    is_sagemaker = any(SAGEMAKER_PREFIX in flag.written for flag in flags)
    port = given.get("port") or ("8080" if is_sagemaker else "8000")
    return f"{scheme}://{host}:{port}"
