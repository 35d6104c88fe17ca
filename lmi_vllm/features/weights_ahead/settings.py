"""The variable of reading ahead: apart from it, since `explain` imports no room that serves."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import FeatureSettings


class WeightsAheadSettings(FeatureSettings):
    """Whether weights are read ahead."""

    # fmt: off
    lmi_read_ahead: bool = variable(parse.boolean, "Weights on a disk are read into memory while "
        "vLLM is imported, as far as half of the free memory holds them.", default=True,
        values="bool")
    # fmt: on
