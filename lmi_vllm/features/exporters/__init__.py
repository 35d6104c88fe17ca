"""What AWS and LMI's tools read: CloudWatch's embedded metrics, SageMaker's file, LMI's lines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.exporters.emf import EmfSettings
    from lmi_vllm.features.exporters.lmi_series import LmiSeriesSettings
    from lmi_vllm.features.exporters.percentiles import PercentileSettings
    from lmi_vllm.features.exporters.sagemaker_lines import SageMakerSettings

    c.settings += (EmfSettings, LmiSeriesSettings, PercentileSettings, SageMakerSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.exporters.percentiles import logging_request_metrics
    from lmi_vllm.features.exporters.start import exporting

    s.lifespans.append(exporting)
    s.model_parts.append(logging_request_metrics)
