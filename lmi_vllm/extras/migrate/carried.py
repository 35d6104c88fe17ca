"""Variables that a migration keeps by their own name, and those that it reports as lost."""

from collections.abc import Collection, Mapping
from typing import Final

from lmi_vllm.config.other_servers.replacement import Replacement, variable
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.variable_names import OPTION_PREFIX, SERVING_PREFIX
from lmi_vllm.extras.migrate.migration import Migration

# Read here, or by the libraries below, under the same names.
_SAME: Final = (
    "SAGEMAKER_", "DJL_", "LMI_", "VLLM_", "HF_", "AWS_", "OTEL_", "NCCL_", "CUDA_", "TORCH",
    "PYTORCH_", "TRANSFORMERS_", "HUGGING", "RAY_", "OMP_",
)  # fmt: skip
# Of these in our own environment a migration is not meant by chance.
_OURS: Final = ("SAGEMAKER_", "DJL_", "LMI_", "VLLM_", "HF_HUB_")


def carry(
    migration: Migration, environ: Mapping[str, str], read: Collection[str], *, is_given: bool
) -> None:
    """Keep each variable that was not read as a setting; `is_given` if they came from a file.

    Without a file these are the variables of our own process: most of them mean nothing.
    """
    table = migration.configuration.options
    whole = {row.name for row in table.rows.variables}
    for name, text in environ.items():
        if name in read or not text or table.is_kubernetes_made(name, text):
            continue
        is_ours = name in whole or name.startswith(_OURS)
        if not (is_given or is_ours):
            continue
        source = f"{name}={mask_text(name, text)}"
        if name.startswith((OPTION_PREFIX, SERVING_PREFIX)):
            migration.add(source, Replacement(None, why="another value of this setting counts"))
        elif is_ours or name.startswith(_SAME):
            migration.add(source, variable(name, text))
        else:
            migration.add(source, variable(name, text, "kept; this server does not read it"))


def report_unread(migration: Migration, names: Collection[str]) -> None:
    """Report variables whose value is not in the file: of secrets, or of expressions."""
    for name in names:
        why = "its value is not in the file: set it to what it was"
        migration.add(name, Replacement(None, why=why))
