"""How requests are answered: replies, chat, custom code."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import Section, maps_to, no_effect, option, ours, warns
from lmi_vllm.messages import FRAMINGS


class Serving(Section):
    """The format of answers, and their time limits."""

    section = "Requests and replies"

    # fmt: off
    output_formatter: str | None = option(parse.plain_text, ours(),
        values=f"{', '.join(FRAMINGS)}, or a function of model.py",
        note="Shape of replies. Unset means json, and jsonlines for a stream. 3p has text, token "
        "counts and metering.")
    tgi_compat: bool = option(parse.boolean, ours(), default=False,
        note="Answer in the schema of Text Generation Inference.")
    stream_logprobs: bool = option(parse.boolean, ours(), default=True,
        note="false: streamed rows carry no log probabilities.")
    single_bos: bool = option(parse.boolean, ours(), default=False,
        note="true: a prompt whose text begins with the BOS token gets no second one before it.")
    model_loading_timeout: float = option(parse.seconds, ours(), default=1800, is_lenient=True,
        values="seconds", note="Time the engine has to start, without downloads. "
        "After it the start fails.")
    predict_timeout: float = option(parse.seconds, ours(), default=240, is_lenient=True,
        values="seconds", note="Time one request may take.")
    served_model_name: list[str] | None = option(parse.words, maps_to("served_model_name"),
        values="list", note="Names that the model answers to (`lmi` when unset).")
    enable_streaming: str | None = option(parse.any_text, warns("streaming is decided per request "
        "(\"stream\": true)", quiet_for=("false", "False", "FALSE")))
    bedrock_compat: str | None = option(parse.any_text,
        warns("that schema belonged to the old rolling batch", quiet_for=("false",)))
    # fmt: on


class Chat(Section):
    """Chat templates, tools and reasoning."""

    section = "Chat, tools and reasoning"

    # fmt: off
    enable_auto_tool_choice: bool = option(parse.boolean, ours(), default=False,
        note="Let the model decide to call tools. Needs tool_call_parser.")
    tool_call_parser: str | None = option(parse.plain_text, ours(), values="parser name",
        note="How tool calls are read from the model's text.")
    tool_parser_plugin: str | None = option(parse.plain_text, ours(), values="path",
        note="Python file that registers further tool parsers.")
    enable_reasoning: bool = option(parse.boolean, ours(), default=False,
        note="Older switch: checks that reasoning_parser is set and known.")
    reasoning_parser: str | None = option(parse.plain_text, maps_to("reasoning_parser"),
        values="parser name", note="How thinking is separated from the answer.")
    reasoning_parser_plugin: str | None = option(parse.as_vllm, maps_to("reasoning_parser_plugin"),
        values="path", note="Python file that registers further reasoning parsers.")
    chat_template: str | None = option(parse.any_text, ours(), values="path or Jinja text",
        note="Replaces the model's own chat template.")
    chat_template_content_format: str = option(parse.one_of("auto", "string", "openai"), ours(),
        default="auto", values="auto, string, openai",
        note="What the template expects as message content.")
    # fmt: on


class Code(Section):
    """Code of the model directory, and the process that runs it."""

    section = "Custom code and process"

    # fmt: off
    entry_point: str | None = option(parse.any_text, ours(), name="entryPoint",
        values="file, path, URL or djl_python module",
        note="model.py of the model directory is used when unset.")
    handler: str = option(parse.plain_text, ours(), default="handle", values="name",
        note="Function of the entry point.")
    env: dict[str, str] | None = option(parse.environment_pairs, ours(), values="`A=1,B=2`",
        note="Environment variables for the engine process.")
    async_mode: str | None = option(parse.any_text,
        warns("async mode is always on", quiet_for=("true", "True", "TRUE")))
    mpi_mode: str | None = option(parse.any_text, no_effect("there is no MPI process to choose"))
    parallel_loading: str | None = option(parse.any_text, no_effect("there is one process to load"))
    enable_venv: str | None = option(parse.any_text, warns("requirements go into the server's own "
        "environment", quiet_for=("false", "False", "FALSE")))
    python_executable: str | None = option(parse.any_text,
        warns("there is one process and one Python"), name="pythonExecutable")
    # fmt: on
