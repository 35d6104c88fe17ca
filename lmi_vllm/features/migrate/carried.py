"""Variables that a migration keeps by their own name, and those that it reports as lost."""

from collections.abc import Collection, Mapping
from typing import Final

from lmi_vllm.config.options import ALIAS_VARIABLES
from lmi_vllm.config.other_servers.nim_variables import NIM_PREFIX, advice_for
from lmi_vllm.config.other_servers.replacement import Replacement, variable
from lmi_vllm.config.other_servers.tgi_variables import TGI_ONLY_NAMES, TGI_PAIRS, TGI_VARIABLES
from lmi_vllm.config.other_servers.vllm_server import ARGUMENTS_OF_CHARTS
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.setting import FILE_PREFIX, UNSET_TEXTS, Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.config.variable_names import OPTION_PREFIX, SERVING_PREFIX, option_key
from lmi_vllm.features.migrate.migration import Migration, SourceServer

# Read here, or by the libraries below, under the same names.
_SAME: Final = (
    "SAGEMAKER_", "DJL_", "LMI_", "VLLM_", "HF_", "AWS_", "OTEL_", "NCCL_", "CUDA_", "TORCH",
    "PYTORCH_", "TRANSFORMERS_", "HUGGING", "RAY_", "OMP_",
)  # fmt: skip
# Of these in our own environment a migration is not meant by chance.
_OURS: Final = ("SAGEMAKER_", "DJL_", "LMI_", "VLLM_", "HF_HUB_")
_WRITTEN_OUT: Final = "nothing reads it by itself: migrate -- FLAGS converts the flags in it"
_OF_TGI: Final = frozenset(name for name in TGI_VARIABLES if name.startswith("CUDA_"))
_GRAPH_SIZES: Final = f"{FILE_PREFIX}cudagraph_capture_sizes"
_ALIASES: Final = {alias.source: alias.target for alias in ALIAS_VARIABLES}


def carry(
    migration: Migration,
    environ: Mapping[str, str],
    read: Collection[str],
    settings: Settings,
    *,
    is_given: bool,
) -> None:
    """Keep each variable that is none of the `settings`; `is_given` if they came from a file.

    Without a file these are the variables of our own process: most of them mean nothing.
    """
    table = migration.configuration.options
    for name, text in environ.items():
        if name in read or not text or table.is_kubernetes_made(name, text):
            continue
        is_ours = name in table.variables or name.startswith(_OURS)
        if not (is_given or is_ours):
            continue
        source = f"{name}={mask_text(name, text)}"
        if name.startswith((OPTION_PREFIX, SERVING_PREFIX)):
            why = _why_unused(migration, environ, settings, name)
            migration.add(source, Replacement(None, why=why))
        elif name in _ALIASES:
            migration.add(source, _alias(migration, name, text))
        elif name in ARGUMENTS_OF_CHARTS:
            migration.add(source, Replacement(None, why=_WRITTEN_OUT))
        elif is_ours or (name.startswith(_SAME) and name not in _OF_TGI):
            migration.add(source, variable(name, text))
        else:
            migration.add(source, variable(name, text, _why_kept(migration, environ, name)))


def _why_kept(migration: Migration, environ: Mapping[str, str], name: str) -> str:
    """Say why a variable that this server does not read is kept."""
    if name.startswith(NIM_PREFIX):
        return advice_for(name)
    is_of_tgi = name in TGI_VARIABLES or name in TGI_PAIRS
    has_tgi = is_of_tgi and any(environ.get(one) for one in TGI_ONLY_NAMES)
    if has_tgi and migration.server is SourceServer.LMI:
        return "it is of TGI's launcher and is not read here: migrate --from tgi converts it"
    return "kept; this server does not read it"


def _why_unused(
    migration: Migration, environ: Mapping[str, str], settings: Settings, name: str
) -> str:
    """Say what counts instead of a variable of ours."""
    text = environ[name]
    if migration.server is not SourceServer.LMI:
        return _why_not_of_source(migration, name)
    if text in UNSET_TEXTS:
        return f"{text} is no value: the variable counts as unset"
    if any(f"({name})" in error for error in settings.errors):
        return "it cannot be used, see below"
    counted = _setting_of(migration, settings, name)
    if counted is None or not counted.is_set:
        return "it has no effect here"
    if environ.get(counted.origin.name) == text:
        return f"{counted.stated} says the same, and counts"
    return f"{counted.stated} counts"


def _why_not_of_source(migration: Migration, name: str) -> str:
    """Say that another server than LMI does not read a variable of ours, and what the file has."""
    written = migration.properties
    row = None
    if name.startswith(OPTION_PREFIX):
        row = migration.configuration.options.find(option_key(name).partition(".")[2])
    keys = () if row is None else (row.name, *row.aliases, *row.effect.targets)
    found = (key for key in map(FILE_PREFIX.__add__, keys) if key in written)
    counts = next((f"{key}={written[key]} counts" for key in found), "set it here if it is meant")
    return f"{migration.server} does not read it; {counts}"


def _setting_of(migration: Migration, settings: Settings, name: str) -> Setting | None:
    """Return the setting that a variable of ours stands for; None where there is none."""
    if name.startswith(OPTION_PREFIX):
        row = migration.configuration.options.find(option_key(name).partition(".")[2])
    else:
        row = migration.server_row(name.removeprefix(SERVING_PREFIX).lower())
    known = row.name if row is not None else None
    return next((one for one in settings.all_details() if one.name == known), None)


def _alias(migration: Migration, name: str, text: str) -> Replacement:
    """Keep an older name of an option, unless the file that is written sets that option."""
    target = _ALIASES[name]
    key = option_key(target) if target.startswith(OPTION_PREFIX) else ""
    if key in migration.properties:
        return Replacement(None, why=f"{key}={migration.properties[key]} counts")
    if name == "ENABLE_CUDA_GRAPHS" and _GRAPH_SIZES in migration.properties:
        why = f"{_GRAPH_SIZES}={migration.properties[_GRAPH_SIZES]} counts: only older TGI reads it"
        return Replacement(None, why=why)
    return variable(name, text)


def report_unread(migration: Migration, names: Collection[str]) -> None:
    """Report variables whose value is not in the file: of secrets, or of expressions."""
    for name in names:
        why = "its value is not in the file: set it to what it was"
        migration.add(name, Replacement(None, why=why))
