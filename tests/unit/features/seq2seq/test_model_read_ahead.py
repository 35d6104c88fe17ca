"""T5 of a model that is not here: what its config.json says counts before a byte is fetched."""

import pytest

from lmi_vllm.errors import ConfigurationError
from tests.support.remote_models import Place, explained, in_s3, on_a_hub, planned


@pytest.mark.parametrize("place", [on_a_hub, in_s3])
def test_degree_that_t5_cannot_have_is_refused_before_the_fetch(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `explain` and by the plan of a start; nothing but small files is asked for."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with place({"architectures": ["T5ForConditionalGeneration"]}) as (environ, asked):
        environ |= {"TENSOR_PARALLEL_DEGREE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        (error,) = explained(environ, capsys)["errors"]
        assert "tensor_parallel_size=2" in error
        assert "runs on one device" in error
        with pytest.raises(ConfigurationError, match="runs on one device"):
            planned(environ)
    assert asked.count("config.json") == 2
    assert set(asked) - {"serving.properties"} == {"config.json"}  # a prefix may have options


def test_hub_model_may_have_pickled_weights_on_all_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the guides recommend for T5: `max` is one device, and .bin files are read."""
    with on_a_hub({"architectures": ["T5ForConditionalGeneration"]}) as (environ, _):
        environ |= {"TENSOR_PARALLEL_DEGREE": "max", "OPTION_LOAD_FORMAT": "pt"}
        document = explained(environ, capsys)
        plan = planned(environ)
    assert document["errors"] == []
    assert document["engine_args"]["tensor_parallel_size"] == 1
    assert any("means one device" in warning for warning in document["warnings"])
    assert plan.arguments.values["load_format"] == "pt"
