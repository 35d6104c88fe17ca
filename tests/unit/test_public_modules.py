"""The modules of rooms that features import: the list may only become shorter."""

from collections import defaultdict

from tests.unit.test_architecture import FILES, arrows

# Those that several features use, by room; `-` is the package itself.
SHARED = """
    -: _version assembly cli clock errors hooks host_memory messages private_folders signals
    adapters: adapter hooks registry source
    checks: model model_config
    commands: explain
    config: listen options.row parsers secrets setting settings value_rules variable_names
        vllm_schema other_servers.tgi_variables other_servers.vllm_flags
    engine: base deaths factory vllm.factory vllm.forks vllm.names vllm.start_steps
        vllm.workarounds
    inference: context lifecycle queue request.body request.lmi request.parameters request.tgi
        start_progress start_words
        response.openai_events
        response.streams service
    server: context listeners model_settings parts plan start_parts warm_up
    sources: archives base disk extract local table trusted_folders
    telemetry: log_handler metrics observers records
    translate: arguments configuration devices draft explain
    web: inference_routes request rerouting
"""
# Those that one feature reaches into: what it needs may move to it, or behind a public name.
OF_ONE = """
    -: demo
    adapters: listing
    checks: adapter_config model_length platform
    commands: serve
    config: layers model_source option_table options other_servers.nim_variables
        other_servers.replacement other_servers.vllm_server properties
    engine: text_bounds vllm.chunks vllm.configuration vllm.cpu.companions vllm.engine_calls
        vllm.joined vllm.outputs vllm.start vllm.tokenizer_trial
        vllm.workarounds.audio_files
    inference: pipeline response.formatters
    server: code_start model_manager model_start ports supervisor
    sources: model_store
    translate: parallel rules
    web: cross_site engine_routes management_routes
"""


def named(text: str) -> set[str]:
    """Return the modules of a list."""
    found, room = set(), ""
    for word in text.split():
        if word.endswith(":"):
            room = word.removesuffix(":")
        else:
            found.add(word if room == "-" else f"{room}.{word}")
    return found


def used() -> dict[str, set[str]]:
    """Return the modules of rooms that features import, and which features do."""
    features: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if path.startswith("features/"):
            for module in arrows(path):
                if not module.startswith("features/"):
                    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    features[name].add(path.split("/")[1])
    return features


def test_features_import_public_modules_alone() -> None:
    """Add none: give what a feature needs to it, or to a module that is listed."""
    assert set(used()) == named(SHARED) | named(OF_ONE)


def test_modules_of_one_feature_are_told_apart() -> None:
    """A second feature that needs one makes it public; one that needs it no more, private again."""
    assert {name for name, features in used().items() if len(features) == 1} == named(OF_ONE)
