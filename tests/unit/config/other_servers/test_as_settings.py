"""Flags and variables of other servers as texts with their origins."""

import argparse
import re
from pathlib import Path

import pytest

from lmi_vllm.assembly import configuration
from lmi_vllm.commands import explain
from lmi_vllm.config.other_servers import nim_variables, vllm_flags
from lmi_vllm.config.other_servers.as_settings import (
    from_flags,
    from_sagemaker,
    from_tgi,
    names_tgi,
    of_images,
    split_words,
)
from lmi_vllm.config.other_servers.vllm_server import ARGUMENTS_OF_CHARTS
from lmi_vllm.config.parsers import lora_modules
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.vllm_schema import VllmArgument, read_release, vllm_argument_names
from tests.support.assembled import load_settings
from tests.unit.config.other_servers.test_vllm_flags import RECORDS

OPTIONS = configuration().options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-model-len 64", {"option.max_model_len": "64"}),
        ("--shutdown-timeout 45", {"SERVING_SHUTDOWN_TIMEOUT": "45"}),
        ("--uds /run/a.sock", {"SERVING_INFERENCE_ADDRESS": "unix:/run/a.sock"}),
        ("--api-key k", {"LMI_API_KEY": "k"}),
        ("--api-key k l", {"LMI_API_KEY": "k\nl"}),
        ("--api-server-count 2", {"LMI_FRONTEND_PROCESSES": "2"}),
        ("--root-path /a", {"option.root_path": "/a"}),
        ('--allowed-origins ["x"]', {"SERVING_CORS_ALLOWED_ORIGIN": "x"}),
        ("--served-model-name a b", {"option.served_model_name": '["a", "b"]'}),
        (
            "--lora-modules a=/x",
            {"option.lora_modules": "a=/x", "option.enable_lora": "true"},
        ),
        ("--middleware a.b --middleware c.d", {"option.middleware": "a.b,c.d"}),
        ("--chat-template t", {"option.chat_template": "t"}),
    ],
)
def test_flags_become_settings(words: str, expected: dict[str, str]) -> None:
    """Each by the table that `migrate` has, with the flag as its origin."""
    found = from_flags(words.split(), OPTIONS)
    assert {raw.key: raw.text for raw in found.values} == expected
    assert not found.errors
    assert all(raw.origin.name == words.split(maxsplit=1)[0] for raw in found.values)


def test_tls_files_make_the_listener_speak_tls() -> None:
    """VLLM needs no scheme: the files say it."""
    found = from_flags(["--ssl-keyfile", "k", "--ssl-certfile", "c"], OPTIONS)
    values = {raw.key: raw.text for raw in found.values}
    assert values == {"SERVING_PRIVATE_KEY_FILE": "k", "SERVING_CERTIFICATE_FILE": "c"}
    assert found.is_tls


def test_command_of_vllm_has_its_defaults() -> None:
    """Its port and one GPU: each only where nothing else is said."""
    found = from_flags(["/m", "--max-model-len", "64"], OPTIONS, is_vllm=True)
    assert {raw.key: raw.text for raw in found.defaults} == {
        "SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:8000",
        "option.tensor_parallel_size": "1",
        "option.data_parallel_size": "1",
    }
    assert from_flags(["/m", "--uds", "/s"], OPTIONS, is_vllm=True).values[1].text == "unix:/s"


IN_THE_IMAGE = {"SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:8080"}  # its ENV


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "http://0.0.0.0:8000"),
        (IN_THE_IMAGE, "http://0.0.0.0:8000"),
        ({"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:7777"}, "http://127.0.0.1:7777"),
        ({"SM_VLLM_PORT": "9000"}, "http://0.0.0.0:9000"),
        ({**IN_THE_IMAGE, "SM_VLLM_PORT": "9000"}, "http://0.0.0.0:9000"),
        ({**IN_THE_IMAGE, "SM_VLLM_HOST": "127.0.0.1"}, "http://127.0.0.1:8080"),
        ({**IN_THE_IMAGE, "SAGEMAKER_BIND_TO_PORT": "9001"}, "http://0.0.0.0:9001"),
    ],
)
def test_default_address_is_for_servers_without_one(
    environ: dict[str, str], address: str, tmp_path: Path
) -> None:
    """What the user sets stays: a server on loopback was opened to every network."""
    line = CommandLine(vllm=from_flags([], OPTIONS, is_vllm=True), model_store=str(tmp_path))
    assert load_settings(environ, line).server.inference_address == address


@pytest.mark.parametrize("name", ["SM_VLLM_MODEL", "HF_MODEL_ID", "OPTION_MODEL_ID"])
def test_model_of_a_variable_has_its_own_name_too(name: str, tmp_path: Path) -> None:
    """As `vllm serve` names it; elsewhere it is `lmi`."""
    line = CommandLine(vllm=from_flags([], OPTIONS, is_vllm=True), model_store=str(tmp_path))
    assert load_settings({name: "acme/x"}, line).model.served_model_name == ["acme/x"]
    environ = {name: "acme/x", "OPTION_SERVED_MODEL_NAME": "mine"}
    assert load_settings(environ, line).model.served_model_name == ["mine"]


@pytest.mark.parametrize(
    "record", sorted(RECORDS.glob("vllm_arguments_*.json")), ids=lambda path: path.stem
)
def test_no_flag_of_a_release_is_lost(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a setting, has no effect by name, or is refused by name."""
    release = read_release(record)
    monkeypatch.setattr(vllm_flags, "load_release", lambda: release)
    for name, argument in {**release.passed, **release.front_end}.items():
        found = from_flags([f"--{name.replace('_', '-')}={_some_value(argument)}"], OPTIONS)
        outcomes = {*(raw.origin.name for raw in found.values), *found.warnings, *found.errors}
        assert len(outcomes) == 1, (name, outcomes)


def _some_value(argument: VllmArgument) -> str:
    """Return a text that the argument may have."""
    texts = {
        "bool": "true", "flag": "true", "int": "1", "float": "1", "human_int": "1",
        "human_int_or_auto": "1", "json": "[]" if isinstance(argument.default, list) else "{}",
        "json_config": "{}", "json_or_text": "a", "device_ids": "0",
    }  # fmt: skip
    return texts.get(argument.kind, str(argument.choices[0]) if argument.choices else "a=b")


def test_variables_of_sagemaker_s_images_are_settings() -> None:
    """A list by spaces or JSON; an unknown name is told apart from a wrong value."""
    found = from_sagemaker(
        {
            "SM_VLLM_MODEL": "/opt/ml/model",
            "SM_VLLM_MAX_MODEL_LEN": "64",
            "SM_VLLM_LORA_MODULES": "a=/x b=/y",
            "SM_VLLM_ENABLE_LORA": "",
            "SM_VLLM_NO_SUCH": "1",
            "SM_VLLM_SEED": "seven",
        },
        OPTIONS,
    )
    assert {raw.key: raw.text for raw in found.values} == {
        "option.model_id": "/opt/ml/model",
        "option.max_model_len": "64",
        "option.lora_modules": '["a=/x", "b=/y"]',
        "option.enable_lora": "true",
    }
    assert [raw.origin.name for raw in found.values][1] == "SM_VLLM_MAX_MODEL_LEN"
    assert "SM_VLLM_NO_SUCH is not known" in found.unknown[0]
    assert "SM_VLLM_SEED" in found.errors[0]


def test_variables_of_tgi_are_settings() -> None:
    """Two of its names at least, since other programs have a MODEL_ID."""
    environ = {
        "MODEL_ID": "/m",
        "NUM_SHARD": "2",
        "PORT": "80",
        "HOSTNAME": "6f1",
        "QUANTIZE": "awq",
    }
    assert names_tgi(environ)
    assert not names_tgi({"MODEL_ID": "/m"})
    assert {raw.key: raw.text for raw in from_tgi(environ, OPTIONS).values} == {
        "option.model_id": "/m",
        "option.tensor_parallel_degree": "2",
        "option.quantize": "awq",
        "option.tgi_compat": "true",
        "job_queue_size": "128",
        "SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:80",
    }


def test_words_of_our_own_flags_are_told_apart() -> None:
    """The values of vLLM's flags are not taken for the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port")
    parser.add_argument("--demo", action="store_true")
    own = parser._option_string_actions
    words = ["--port", "8", "--max-model-len", "64", "--demo", "/m", "--port=9", "-tp", "2"]
    assert split_words(words, own) == (
        ["--port", "8", "--demo", "--port=9"],
        ["--max-model-len", "64", "/m", "-tp", "2"],
    )


@pytest.mark.parametrize(
    "text",
    [
        "a=/x b=/y",
        "a=/x,b=/y",
        '["a=/x", "b=/y"]',
        '["{\\"name\\": \\"a\\", \\"path\\": \\"/x\\", \\"base_model_name\\": \\"m\\"}", "b=/y"]',
        '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]',
    ],
)
def test_adapters_of_the_start_have_three_spellings(text: str) -> None:
    """As vLLM's flag, once or with several words, and as its variable."""
    assert lora_modules(text) == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize("text", ["a", "=x", "a=", '{"name": "a"}', "[]", "a=/x a=/y", "[1]"])
def test_adapters_that_cannot_be_read_are_refused(text: str) -> None:
    """Nothing is passed over."""
    with pytest.raises(ValueError, match=r"name|two sources|JSON"):
        lora_modules(text)


def test_flag_of_an_older_release_names_the_option_that_stands_for_it() -> None:
    """`--task` was vLLM's; no name of a flag is similar."""
    (error,) = from_flags(["--task", "embed"], OPTIONS).errors
    assert "option.task" in error
    assert "OPTION_TASK" in error


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"SM_VLLM_HOST": "0.0.0.0"}, "http://0.0.0.0:8080"),
        ({"SM_VLLM_HOST": "::", "SM_VLLM_SSL_KEYFILE": "k"}, "https://[::]:8080"),
        ({"SM_VLLM_HOST": "0.0.0.0", "SM_VLLM_PORT": "9000"}, "http://0.0.0.0:9000"),
    ],
)
def test_port_of_sagemaker_s_variables_is_sagemaker_s(
    environ: dict[str, str], address: str
) -> None:
    """AWS's script gives vLLM `--port 8080`; an endpoint on 8000 never became healthy."""
    values = {raw.key: raw.text for raw in from_sagemaker(environ, OPTIONS).values}
    assert values["SERVING_INFERENCE_ADDRESS"] == address


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--swap-space", "leave it out: vLLM has dropped it"),
        ("--device", "leave it out: vLLM finds the device itself"),
        ("--model-id", "name the model by --model"),
    ],
)
def test_flag_whose_option_has_no_effect_is_to_be_left_out(flag: str, advice: str) -> None:
    """To set an option in its place was advice that changed nothing."""
    (error,) = from_flags([flag, "4"], OPTIONS).errors
    assert advice in error
    assert "OPTION_" not in error


@pytest.mark.parametrize("words", ["--nnodes 2 --node-rank 1", "--nnodes 2 --node-rank 3"])
def test_node_that_follows_needs_no_headless(words: str) -> None:
    """VLLM's command of such a node has the flag; alone, or on the leader, it is refused."""
    found = from_flags(["/m", "--headless", *words.split()], OPTIONS)
    assert not found.errors
    assert "--headless has no effect" in found.warnings[0]
    assert from_flags(["/m", "--headless", "--nnodes", "2"], OPTIONS).errors


def test_variables_of_tgi_that_others_have_too_are_named() -> None:
    """SageMaker's TGI endpoints have HF_MODEL_ID, so nothing of TGI's is read."""
    environ = {
        "HF_MODEL_ID": "a/b", "SM_NUM_GPUS": "1", "MAX_TOTAL_TOKENS": "64", "DTYPE": "bfloat16",
        "CUDA_GRAPHS": "1,2", "PORT": "8080", "HOSTNAME": "6f1", "MAX_BATCH_SIZE": "4",
    }  # fmt: skip
    named = {text.split()[0] for text in of_images(environ, OPTIONS, has_model=True).unknown}
    assert named == {"MAX_TOTAL_TOKENS", "DTYPE", "CUDA_GRAPHS", "PORT"}
    assert not of_images({"DTYPE": "x", "PORT": "1"}, OPTIONS, has_model=True).unknown


@pytest.mark.parametrize("name", ARGUMENTS_OF_CHARTS)
def test_arguments_of_charts_count_on_the_command_line(name: str) -> None:
    """KServe's template has `vllm serve … ${VLLM_ADDITIONAL_ARGS}`; without it nothing reads it."""
    environ = {name: "--max-model-len=64 --enforce-eager"}
    (text,) = of_images(environ, OPTIONS, has_model=True).unknown
    assert text.startswith(f"{name} has no effect by itself")
    assert "64" not in text  # a flag may be a key
    written = ("--enforce-eager", "--port")
    assert not of_images(environ, OPTIONS, has_model=True, flags=written).unknown
    assert of_images(environ, OPTIONS, has_model=True, flags=("--max-num-seqs",)).unknown
    assert not of_images({name: ""}, OPTIONS, has_model=True).unknown


def test_variables_of_nim_are_named_with_what_says_the_same() -> None:
    """They passed silently."""
    environ = {"NIM_MODEL_PATH": "hf://a/b", "NIM_MAX_MODEL_LEN": "64", "NIM_X": "1"}
    unknown = of_images(environ, OPTIONS, has_model=False).unknown
    assert [text.split()[0] for text in unknown] == [*environ]
    assert "HF_MODEL_ID" in unknown[0]
    assert "OPTION_MAX_MODEL_LEN" in unknown[1]


def test_every_variable_of_nim_names_one_that_exists() -> None:
    """Its counterpart is an option or a variable of ours."""
    for name, advice in nim_variables._ADVICE.items():
        for word in re.findall(r"OPTION_[A-Z_]+", advice):
            assert OPTIONS.find(word.removeprefix("OPTION_").lower()) is not None, name


def test_variables_of_hugging_face_s_image_are_named_where_they_are_on() -> None:
    """They passed silently, with `--strict` too."""
    environ = {
        "HF_ENABLE_LMCACHE": "1", "HF_ENABLE_RUNAI_STREAMER": "0", "HF_LMCACHE_KV_CONFIG": "{}",
    }  # fmt: skip
    unknown = of_images(environ, OPTIONS, has_model=True).unknown
    assert [text.split()[0] for text in unknown] == ["HF_ENABLE_LMCACHE", "HF_LMCACHE_KV_CONFIG"]
    assert "OPTION_LMCACHE_AUTO_CONFIG" in unknown[0]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("HF_ENABLE_EXPANDABLE_SEGMENTS", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("HF_ENABLE_OPTIMIZATIONS", "a setting of its own"),
        ("HF_ENABLE_TOKENIZERS_GUARD", "TOKENIZERS_PARALLELISM=false"),
        ("HF_ENABLE_XET_HIGH_PERFORMANCE", "HF_XET_HIGH_PERFORMANCE=1"),
        ("HF_LMCACHE_CPU_FRACTION", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
    ],
)
def test_every_variable_of_hugging_face_s_image_is_named(name: str, advice: str) -> None:
    """With the way here; off is how it is here. Those of libraries are theirs."""
    (text,) = of_images({name: "1"}, OPTIONS, has_model=True).unknown
    assert text.startswith(f"{name} has no effect")
    assert advice in text
    off = {name: "0", "HF_ENABLE_PARALLEL_LOADING": "1"}
    assert not of_images(off, OPTIONS, has_model=True).unknown


def test_address_of_two_variables_names_both_in_any_order() -> None:
    """A variable between them hid the first."""
    environ = {"SM_VLLM_HOST": "0.0.0.0", "SM_VLLM_SEED": "1", "SM_VLLM_PORT": "9000"}
    values = {raw.key: raw for raw in from_sagemaker(environ, OPTIONS).values}
    assert len(values) == 2
    assert values["SERVING_INFERENCE_ADDRESS"].origin.name == "SM_VLLM_HOST, SM_VLLM_PORT"


def test_own_flags_are_suggested_too() -> None:
    """`--model` was all that `--model-stor` was near to."""
    (error,) = from_flags(["--model-stor", "/x"], OPTIONS).errors
    assert "--model-store" in error
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser, configuration())
    serve = argparse.ArgumentParser()
    explain.add_settings_arguments(serve)
    own = {*parser._option_string_actions, *serve._option_string_actions}
    known = {f"--{name.replace('_', '-')}" for name in vllm_argument_names()}
    ours = {flag for flag in own - known if flag.startswith("--")} - {"--help"}
    assert ours <= {*vllm_flags.OWN_FLAGS}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"SM_VLLM_MODEL": "acme/x"}, ["acme/x", "lmi"]),
        ({"SM_VLLM_SEED": "1", "HF_MODEL_ID": "acme/x"}, ["acme/x", "lmi"]),
        ({"SM_VLLM_SEED": "1"}, ["/opt/ml/model", "lmi"]),
        ({"SM_VLLM_MODEL": "acme/x", "SM_VLLM_SERVED_MODEL_NAME": "a"}, ["a"]),
        ({"SM_VLLM_MODEL": "acme/x", "OPTION_SERVED_MODEL_NAME": "a"}, ["a"]),
        ({"HF_MODEL_ID": "acme/x"}, None),
    ],
)
def test_model_of_aws_s_image_has_the_name_that_its_clients_send(
    environ: dict[str, str], names: list[str] | None, tmp_path: Path
) -> None:
    """Each request with `"model": "acme/x"` was 404 once the image was replaced."""
    settings = load_settings(environ, CommandLine(model_store=str(tmp_path)))
    assert settings.model.served_model_name == names
    assert not settings.warnings
    setting = settings.model.details.served_model_name
    assert "Hides" not in setting.note
