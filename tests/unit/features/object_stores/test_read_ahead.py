"""config.json of a model in S3: read before a byte of the weights."""

import pytest

from lmi_vllm.errors import ConfigurationError
from tests.support.remote_models import PICKLES, explained, in_s3, planned

QUANTIZED = {"quantization_config": {"quant_method": "squeezellm"}}


def test_unsupported_quantization_is_refused_before_the_fetch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By `explain` and by the plan of a start."""
    with in_s3({"architectures": ["LlamaForCausalLM"]} | QUANTIZED) as (environ, asked):
        (error,) = explained(environ, capsys)["errors"]
        assert "squeezellm" in error
        with pytest.raises(ConfigurationError, match="squeezellm"):
            planned(environ)
    assert "config.json" in asked
    assert not set(asked) & set(PICKLES)
