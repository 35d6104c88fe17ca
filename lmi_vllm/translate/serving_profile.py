"""`Settings` + model -> the profile for request handling."""

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.messages import (
    EngineArguments,
    MediaPolicy,
    ModelArtifacts,
    RequestLimits,
    ServingProfile,
)
from lmi_vllm.translate.model_paths import located
from lmi_vllm.translate.rules import served_task

_DEFAULT_MAX_LOGPROBS = 20  # vLLM's own


def build_serving_profile(
    settings: Settings, model: ModelArtifacts | None, engine: EngineArguments
) -> ServingProfile:
    """The profile of the configured model, which the engine runs with these arguments."""
    arguments, names = engine.values, engine.values.get("served_model_name")
    return ServingProfile(
        model_name=model.name if model is not None else "model",
        model_reference=mask_urls(model.reference) if model is not None else "",
        served_names=tuple(map(str, names)) if isinstance(names, list) and names else ("lmi",),
        task=served_task(arguments),
        output_formatter=settings.model.output_formatter,
        tgi_compat=settings.model.tgi_compat,
        stream_logprobs=settings.model.stream_logprobs,
        normalize=settings.model.normalize,
        enable_lora=settings.model.enable_lora,
        adapter_slots=settings.model.max_loras,
        job_queue_size=settings.server.job_queue_size,
        max_request_size=settings.server.max_request_size,
        max_adapter_size=settings.server.lmi_adapter_max_size,
        adapter_roots=settings.server.adapter_roots,
        predict_timeout=settings.model.predict_timeout,
        chunked_read_timeout=settings.server.chunked_read_timeout,
        enable_auto_tool_choice=settings.model.enable_auto_tool_choice,
        tool_call_parser=settings.model.tool_call_parser,
        tool_parser_plugin=located(settings.model.tool_parser_plugin, model),
        chat_template=located(settings.model.chat_template, model),
        chat_template_content_format=settings.model.chat_template_content_format,
        single_bos=settings.model.single_bos,
        uses_priority=arguments.get("scheduling_policy") == "priority",
        has_token_lane=settings.server.lmi_token_lane,
        limits=_limits(settings, engine),
        media=MediaPolicy(
            allows_private=settings.server.lmi_media_allow_private,
            max_bytes=settings.server.lmi_media_max_size,
            seconds=settings.server.lmi_media_timeout,
            max_pixels=settings.server.lmi_media_max_pixels,
            image_formats=settings.server.lmi_media_image_formats,
        ),
    )


def _limits(settings: Settings, engine: EngineArguments) -> RequestLimits:
    """Bounds on one request; max_logprobs is the engine's."""
    return RequestLimits(
        max_sequences=settings.server.lmi_max_sequences,
        max_stop_strings=settings.server.lmi_max_stop_strings,
        max_stop_length=settings.server.lmi_max_stop_length,
        max_logit_bias=settings.server.lmi_max_logit_bias,
        max_prompt_logprobs=settings.server.lmi_max_prompt_logprobs,
        max_grammar_size=settings.server.lmi_max_grammar_size,
        max_tokenize_length=settings.server.lmi_max_tokenize_length,
        grammar_timeout=settings.server.lmi_grammar_timeout,
        max_logprobs=engine.number("max_logprobs", _DEFAULT_MAX_LOGPROBS),
    )
