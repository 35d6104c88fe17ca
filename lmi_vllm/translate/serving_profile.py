"""`Settings` + model -> what request handling needs to know."""

from collections.abc import Mapping

from lmi_vllm.config.resolved import Settings
from lmi_vllm.messages import MediaPolicy, ModelArtifacts, RequestLimits, ServingProfile
from lmi_vllm.translate.arguments import translate
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.rules import served_task

_DEFAULT_NAMES = ("lmi",)
_DEFAULT_MAX_LOGPROBS = 20  # vLLM's own


def build_serving_profile(settings: Settings, model: ModelArtifacts | None) -> ServingProfile:
    """The profile of the configured model; the settings must be valid."""
    arguments = translate(settings, model, Devices()).arguments.values
    return ServingProfile(
        model_name=model.name if model is not None else "model",
        served_names=_served_names(arguments.get("served_model_name")),
        task=served_task(arguments),
        output_formatter=_text(settings.option_value("output_formatter")),
        tgi_compat=settings.option_value("tgi_compat") is True,
        stream_logprobs=settings.option_value("stream_logprobs") is not False,
        normalize=settings.option_value("normalize") is not False,
        enable_lora=settings.option_value("enable_lora") is True,
        job_queue_size=_integer(settings.server_value("job_queue_size")),
        max_request_size=_integer(settings.server_value("max_request_size")),
        predict_timeout=_seconds(settings.server_value("predict_timeout")),
        chunked_read_timeout=_seconds(settings.server_value("chunked_read_timeout")),
        enable_auto_tool_choice=settings.option_value("enable_auto_tool_choice") is True,
        tool_call_parser=_text(settings.option_value("tool_call_parser")),
        reasoning_parser=_text(settings.option_value("reasoning_parser")),
        chat_template=_text(settings.option_value("chat_template")),
        chat_template_content_format=str(settings.option_value("chat_template_content_format")),
        uses_priority=arguments.get("scheduling_policy") == "priority",
        limits=_limits(settings, arguments),
        media=MediaPolicy(
            allows_private=settings.server_value("LMI_MEDIA_ALLOW_PRIVATE") is True,
            max_bytes=_integer(settings.server_value("LMI_MEDIA_MAX_SIZE")),
            seconds=_seconds(settings.server_value("LMI_MEDIA_TIMEOUT")),
        ),
    )


def _limits(settings: Settings, arguments: Mapping[str, object]) -> RequestLimits:
    """What one request may ask for; max_logprobs is the engine's."""
    max_logprobs = arguments.get("max_logprobs")
    return RequestLimits(
        max_sequences=_integer(settings.server_value("LMI_MAX_SEQUENCES")),
        max_stop_strings=_integer(settings.server_value("LMI_MAX_STOP_STRINGS")),
        max_stop_length=_integer(settings.server_value("LMI_MAX_STOP_LENGTH")),
        max_logit_bias=_integer(settings.server_value("LMI_MAX_LOGIT_BIAS")),
        max_grammar_size=_integer(settings.server_value("LMI_MAX_GRAMMAR_SIZE")),
        grammar_timeout=_seconds(settings.server_value("LMI_GRAMMAR_TIMEOUT")),
        max_logprobs=_DEFAULT_MAX_LOGPROBS if max_logprobs is None else int(str(max_logprobs)),
    )


def _served_names(names: object) -> tuple[str, ...]:
    """The names the model answers to."""
    if isinstance(names, list) and names:
        return tuple(str(name) for name in names)
    return _DEFAULT_NAMES


def _text(value: object) -> str | None:
    """`value` as text, None staying None."""
    return None if value is None else str(value)


def _integer(value: object) -> int:
    """A value that the option table's parser made an integer."""
    if not isinstance(value, int):
        raise TypeError(f"an integer was expected, not {value!r}")
    return value


def _seconds(value: object) -> float:
    """A value that the option table's parser made a number of seconds."""
    if not isinstance(value, int | float):
        raise TypeError(f"a number was expected, not {value!r}")
    return float(value)
