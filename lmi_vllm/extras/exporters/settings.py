"""What is exported, and where to."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import ExtraSettings


class ExporterSettings(ExtraSettings):
    """CloudWatch's lines on stdout, and the file that SageMaker names."""

    # fmt: off
    lmi_metrics_emf: bool = variable(parse.boolean, "Write CloudWatch EMF lines on stdout.",
        default=False, values="bool")
    lmi_metrics_emf_interval: float = variable(parse.seconds, "Time between two of them.",
        default=60, values="seconds")
    lmi_metrics_emf_namespace: str = variable(parse.any_text,
        "CloudWatch namespace of their metrics.", default="lmi_vllm")
    sm_telemetry_log_rev_2022_12: str | None = variable(parse.any_text,
        "File to which telemetry lines are appended; SageMaker sets it.", values="path")
    # fmt: on
