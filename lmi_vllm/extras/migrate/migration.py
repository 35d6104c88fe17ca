"""An existing configuration -> ours, with what was mapped, approximated and refused."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.load import load_settings
from lmi_vllm.config.options import ENV, ENVIRONMENT_SETTINGS, FILE, EffectWord, all_rows
from lmi_vllm.config.parsers import words
from lmi_vllm.config.properties import PropertiesFile, parse_properties
from lmi_vllm.config.secrets import is_secret, mask_text, mask_value
from lmi_vllm.config.setting import FILE_PREFIX, Setting
from lmi_vllm.config.variable_names import (
    OPTION_PREFIX,
    SERVING_PREFIX,
    find_option,
)
from lmi_vllm.extras.migrate.tgi_variables import (
    TGI_MARKS,
    TGI_PAIRS,
    TGI_VARIABLES,
    Carried,
    Carry,
    nothing,
    refused,
    to,
)
from lmi_vllm.extras.migrate.vllm_flags import Flag, read_flags, read_variables
from lmi_vllm.translate.arguments import translate
from lmi_vllm.translate.devices import Devices

_ENOUGH_GPUS: Final = 1024  # the target machine is not known: nothing may fail for want of GPUs
_NO_STORE: Final = MappingProxyType({"SERVING_MODEL_STORE": "/nonexistent"})

_SERVER_ROWS: Final = MappingProxyType({row.name: row for row in all_rows().server})


def _origins(text: str) -> Carried:
    """Allowed origins, which vLLM takes as a JSON list."""
    origins = ",".join(words(text))
    return Carried("SERVING_CORS_ALLOWED_ORIGIN", origins)


def _lora_modules(text: str) -> Carried:
    """Adapters that vLLM loads by name and path."""
    why = f"put the adapters ({text}) below adapters/ of the model directory"
    return Carried("option.enable_lora", "true", why)


_FRONT_END: Final[Mapping[str, Carry]] = MappingProxyType(
    {
        "api_key": to("LMI_API_KEY"),
        "api_server_count": to("LMI_FRONTEND_PROCESSES"),
        "allowed_origins": _origins,
        "lora_modules": _lora_modules,
        "ssl_keyfile": to("SERVING_PRIVATE_KEY_FILE"),
        "ssl_certfile": to("SERVING_CERTIFICATE_FILE"),
        "tool_server": refused("tool servers are not supported"),
        "headless": refused("one process serves one node"),
        "grpc": refused("there is no gRPC server"),
        "config": refused("give the flags of that file on the command line"),
        "ssl_ca_certs": refused("client certificates are not checked; put a proxy in front"),
    }
)
_OTHER_FRONT_END: Final = nothing(
    "it belongs to vLLM's own HTTP server, which this server replaces"
)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was found and what became of it."""

    outcome: str  # mapped, approximated, refused
    source: str
    becomes: str = ""
    why: str = ""


@dataclass(slots=True)
class Migration:
    """The configuration being written, and the report."""

    origin: str
    properties: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def carry(self, source: str, carried: Carried) -> None:
        """Write what one source became, and report it."""
        if carried.is_refused:
            self.steps.append(Step("refused", source, why=carried.why))
            return
        becomes = "nothing to set"
        if carried.key is not None:
            becomes = self._write(carried.key, carried.text)
        outcome = "approximated" if carried.why or carried.key is None else "mapped"
        self.steps.append(Step(outcome, source, becomes, carried.why))

    def _write(self, key: str, text: str) -> str:
        """Set `key`; a secret is never copied, only its new name is said."""
        is_variable = key.isupper()
        if is_secret(key) and not key.endswith("_FILE"):
            return f"{key} (set it to the same value)"
        (self.environment if is_variable else self.properties)[key] = text
        return f"{key}={mask_text(key.removeprefix(FILE_PREFIX), text)}"

    def default(self, key: str, text: str, why: str) -> None:
        """Set `key` where the source leaves it to a default that differs from ours."""
        if key not in self.properties:
            self.properties[key] = text
            self.steps.append(Step("mapped", "(default)", f"{key}={text}", why))

    @property
    def is_complete(self) -> bool:
        """Whether nothing was refused."""
        return all(step.outcome != "refused" for step in self.steps)


def recognise(environ: Mapping[str, str], file: PropertiesFile | None, flags: bool) -> str:
    """Which server the configuration is for: vllm, sm-vllm, lmi or tgi."""
    if flags:
        return "vllm"
    if any(name.startswith("SM_VLLM_") for name in environ):
        return "sm-vllm"
    is_lmi = file is not None or any(name.startswith("OPTION_") for name in environ)
    return "tgi" if not is_lmi and any(name in environ for name in TGI_MARKS) else "lmi"


def migrate_tgi(environ: Mapping[str, str]) -> Migration:
    """A TGI environment as ours."""
    migration = Migration("tgi")
    for name, text in environ.items():
        carry = TGI_VARIABLES.get(name)
        if carry is None or not text:
            continue
        source = f"{name}={mask_text(name, text)}"
        try:
            migration.carry(source, carry(text))
        except ValueError as error:
            why = f"{text!r} cannot be read: {error}"
            migration.carry(source, Carried(None, why=why, is_refused=True))
    _carry_pairs(migration, {name: environ[name] for name in TGI_PAIRS if environ.get(name)})
    migration.default("option.tgi_compat", "true", "replies keep TGI's schema")
    migration.default("job_queue_size", "128", "TGI's max_concurrent_requests")
    return checked(migration)


def _carry_pairs(migration: Migration, given: Mapping[str, str]) -> None:
    """TGI's address and rope variables, which count together."""
    host = given.get("HOSTNAME", "0.0.0.0")
    if not re.fullmatch(r"[0-9.:]+|localhost", host):
        host = "0.0.0.0"
    if "PORT" in given:
        address = f"http://{host}:{given['PORT']}"
        migration.carry(f"PORT={given['PORT']}", Carried("SERVING_INFERENCE_ADDRESS", address))
    if "ROPE_SCALING" in given or "ROPE_FACTOR" in given:
        factor = given.get("ROPE_FACTOR", "1.0")
        kind = given.get("ROPE_SCALING", "linear")
        source = ", ".join(f"{name}={given[name]}" for name in given if name.startswith("ROPE"))
        try:
            override = {"rope_scaling": {"rope_type": kind, "factor": float(factor)}}
        except ValueError:
            why = f"{factor!r} is no number"
            migration.carry(source, Carried(None, why=why, is_refused=True))
            return
        why = "vLLM checks rope settings against the model's own"
        migration.carry(source, Carried("option.hf_overrides", json.dumps(override), why))


def migrate_vllm(flags: Sequence[str]) -> Migration:
    """The flags of `vllm serve` as ours."""
    return _from_flags(Migration("vllm"), read_flags(flags))


def migrate_sagemaker_vllm(environ: Mapping[str, str]) -> Migration:
    """`SM_VLLM_*` variables as ours."""
    return _from_flags(Migration("sm-vllm"), read_variables(environ))


def _from_flags(migration: Migration, flags: Sequence[Flag]) -> Migration:
    """Every flag, and vLLM's defaults where ours differ."""
    for flag in flags:
        migration.carry(flag.source, _carry_flag(flag, flags))
    properties = migration.properties
    address = _vllm_address(flags)
    if address.startswith("https") and "SERVING_INFERENCE_ADDRESS" not in migration.environment:
        migration.carry("(default)", Carried("SERVING_INFERENCE_ADDRESS", address))
    if "option.model_id" in properties:
        model = properties["option.model_id"]
        migration.default("option.served_model_name", model, "vllm serve answers to the model id")
    migration.default("option.tensor_parallel_size", "1", "vLLM uses one GPU; ours all of them")
    migration.default("option.data_parallel_size", "1", "vLLM makes no copies by itself")
    if properties.get("option.enable_lora") == "true":
        migration.default("option.max_loras", "1", "vLLM's default")
    if "option.max_num_seqs" not in properties:
        why = "vLLM's max_num_seqs depends on the hardware; set it to keep what you had"
        becomes = "option.max_rolling_batch_size=256"
        migration.steps.append(Step("approximated", "(default)", becomes, why))
    return checked(migration)


def _carry_flag(flag: Flag, flags: Sequence[Flag]) -> Carried:
    """What one flag of vLLM becomes."""
    if flag.problem:
        return Carried(None, why=flag.problem, is_refused=True)
    if flag.name == "model":
        return Carried("option.model_id", flag.text)
    if flag.is_engine or find_option(flag.name) is not None:
        return Carried(f"option.{flag.name}", flag.text)
    if flag.name in ("host", "port"):
        return Carried("SERVING_INFERENCE_ADDRESS", _vllm_address(flags))
    return _FRONT_END.get(flag.name, _OTHER_FRONT_END)(flag.text)


def _vllm_address(flags: Sequence[Flag]) -> str:
    """Where `vllm serve` listens; with a key or certificate by https."""
    given = {flag.name: flag.text for flag in flags}
    scheme = "https" if given.keys() & {"ssl_keyfile", "ssl_certfile"} else "http"
    return f"{scheme}://{given.get('host') or '0.0.0.0'}:{given.get('port') or '8000'}"


def migrate_lmi(environ: Mapping[str, str], file: PropertiesFile | None) -> Migration:
    """An LMI configuration of any backend, without what has no effect any more."""
    migration = Migration("lmi")
    without_secrets = {name: text for name, text in environ.items() if not is_secret(name)}
    settings = load_settings({**without_secrets, **_NO_STORE}, extra_properties=file)
    translation = translate(settings, None, Devices(_ENOUGH_GPUS))
    warnings = (*settings.warnings, *translation.warnings)
    unnamed = [*settings.errors, *translation.errors]
    texts = _texts_by_origin(environ, file)
    for setting in settings.all_details():
        is_ours = setting.origin.name != "SERVING_MODEL_STORE"
        if not setting.is_set or not is_ours or setting.name.isupper():
            continue
        source = _as_written(setting, texts)
        faults = [text for text in (*settings.errors, *translation.errors) if setting.label in text]
        if faults:  # what serve would stop at is written nowhere
            migration.steps.append(Step("refused", source, why="; ".join(faults)))
            unnamed = [text for text in unnamed if text not in faults]
        else:
            said = [text for text in warnings if setting.label in text or setting.stated in text]
            migration.carry(source, _carry_setting(setting, said))
    _name_secrets(migration, environ)
    for error in unnamed:
        migration.steps.append(Step("refused", "(check)", why=error))
    for setting in settings.others:
        if setting.effect == EffectWord.UNKNOWN:
            migration.steps.append(Step("refused", setting.label, why=setting.note))
    return migration


def _name_secrets(migration: Migration, environ: Mapping[str, str]) -> None:
    """Say of each secret that we read that it has to be set again: none is copied."""
    known = {row.name for row in ENVIRONMENT_SETTINGS}
    for name, text in environ.items():
        is_read = name in known or name.startswith(OPTION_PREFIX)
        if text and is_read and is_secret(name):
            migration.carry(f"{name}={mask_text(name, text)}", Carried(name, text))


def _texts_by_origin(environ: Mapping[str, str], file: PropertiesFile | None) -> Mapping[str, str]:
    """What stands at each place a value can come from, before anything is made of it."""
    entries = file.entries if file is not None else ()
    return {**environ, **{str(file.origin(entry)): entry.value for entry in entries if file}}


def _as_written(setting: Setting, texts: Mapping[str, str]) -> str:
    """Name, text and place of a setting as they were written; secrets masked."""
    text = texts.get(str(setting.origin))
    if text is None:
        return setting.stated
    name = setting.written or setting.name
    return f"{name}={mask_value(setting.name, text)} ({setting.origin})"


def _carry_setting(setting: Setting, warnings: list[str]) -> Carried:
    """What one LMI setting becomes; warnings about it are the reason of an approximation."""
    why = "; ".join(warnings)
    row = find_option(setting.name)
    key = setting.written or setting.name
    if setting.effect in (EffectWord.WARNS, EffectWord.NONE):
        return Carried(None, why=why or setting.note or "it has no effect here")
    if setting.effect == EffectWord.REFUSES:
        return Carried(None, why="reported below" if setting.value else "it was off")
    if setting.value is None:  # such as the name of the built-in handler
        return Carried(None, why=why or "it is the default here")
    if row is not None and row.effect.is_fallback and "no effect" not in why:
        key = f"{FILE_PREFIX}{setting.target}"
    server = _SERVER_ROWS.get(setting.name)
    if server is not None and FILE not in server.written:
        key = f"{SERVING_PREFIX}{setting.name.upper()}"
    return Carried(key, as_text(setting.value), why)


def as_text(value: object) -> str:
    """`value` as it is written in a properties file."""
    if value is None:
        return "None"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def checked(migration: Migration) -> Migration:
    """The migration after its result was read back: what we would refuse is reported here."""
    file = parse_properties(as_properties(migration.properties), "the result")
    settings = load_settings({**migration.environment, **_NO_STORE}, extra_properties=file)
    translation = translate(settings, None, Devices(_ENOUGH_GPUS))
    for error in (*settings.errors, *translation.errors):
        migration.steps.append(Step("refused", "(check)", why=error))
    return migration


def as_properties(properties: Mapping[str, str]) -> str:
    """Keys and values as properties text that reads back the same."""
    return "".join(
        f"{_escape(key, ' =:#!')}={_escape(text, '')}\n" for key, text in properties.items()
    )


def as_variables(migration: Migration) -> tuple[dict[str, str], dict[str, str]]:
    """The result as variables alone, and what of it has no variable and needs the file."""
    variables, rest = dict(migration.environment), {}
    for key, text in migration.properties.items():
        row = _SERVER_ROWS.get(key)
        if key.startswith(FILE_PREFIX):
            variables[OPTION_PREFIX + key.removeprefix(FILE_PREFIX).upper()] = text
        elif row is not None and ENV in row.written:
            variables[SERVING_PREFIX + key.upper()] = text
        else:
            rest[key] = text
    return variables, rest


def _escape(text: str, also: str) -> str:
    """`text` with what properties syntax would read otherwise escaped."""
    escaped = re.sub(rf"([\\{re.escape(also)}])", r"\\\1", text)
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f"\\{escaped}" if escaped[:1] == " " else escaped
