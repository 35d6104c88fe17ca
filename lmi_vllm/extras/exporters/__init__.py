"""What AWS and LMI's tools read: CloudWatch's embedded metrics, SageMaker's file, LMI's lines."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(
        Lazy("lmi_vllm.extras.exporters.emf:EmfSettings"),
        Lazy("lmi_vllm.extras.exporters.lmi_series:LmiSeriesSettings"),
        Lazy("lmi_vllm.extras.exporters.percentiles:PercentileSettings"),
        Lazy("lmi_vllm.extras.exporters.sagemaker_lines:SageMakerSettings"),
    ),
    lifespan=Lazy("lmi_vllm.extras.exporters.start:exporting"),
)
