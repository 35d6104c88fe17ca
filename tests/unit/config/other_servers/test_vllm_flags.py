"""Flags of `vllm serve` as our options, in the spellings of every recorded release."""

from pathlib import Path

import pytest

from lmi_vllm.config import vllm_schema
from lmi_vllm.config.other_servers import vllm_flags
from lmi_vllm.config.other_servers.vllm_flags import read_flags, read_variables
from lmi_vllm.config.vllm_schema import read_release

RECORDS = Path(vllm_schema.__file__).parent / "data"


@pytest.mark.parametrize(
    ("release", "words", "expected"),
    [
        ("0.33", "--disable-prefix-caching", ("enable_prefix_caching", "false")),
        ("0.33", "--enable-sliding-window", ("disable_sliding_window", "false")),
        ("0.33", "--no-enable-lora", ("enable_lora", "false")),
        ("0.33", "--disable-lora", ("enable_lora", "false")),
        ("0.33", "-ep", ("enable_expert_parallel", "true")),
        ("0.32", "--no-enable-prefix-caching", ("enable_prefix_caching", "false")),
        ("0.31", "--enable-prefix-caching", ("enable_prefix_caching", "true")),
    ],
)
def test_switches_are_read_as_that_release_does(
    release: str, words: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 pairs --enable-x with --disable-x, and still takes --no-."""
    record = read_release(RECORDS / f"vllm_arguments_{release}.json")
    monkeypatch.setattr(vllm_flags, "load_release", lambda: record)
    (flag,) = read_flags([words])
    assert (flag.name, flag.text, flag.problem) == (*expected, "")


def test_flag_of_a_later_release_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.32 would refuse it as well."""
    record = read_release(RECORDS / "vllm_arguments_0.32.json")
    monkeypatch.setattr(vllm_flags, "load_release", lambda: record)
    (flag,) = read_flags(["--disable-prefix-caching"])
    assert "vLLM 0.32 has no such flag" in flag.problem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-O3", {"optimization_level": "3"}),
        ("-O 2", {"optimization_level": "2"}),
        ("-cc.mode 2", {"compilation_config": '{"mode": 2}'}),
        ("--compilation-config.a.b=2 -cc.a.c 3", {"compilation_config": '{"a": {"b": 2, "c": 3}}'}),
        (
            "-cc.cudagraph_capture_sizes+ 1,2",
            {"compilation_config": '{"cudagraph_capture_sizes": ["1", "2"]}'},
        ),
        ("--max-mod 300 /m", {"max_model_len": "300", "model": "/m"}),
        ("--device-memory 0.5", {"gpu_memory_utilization": "0.5"}),
        ("vllm serve /m --enforce-eager", {"model": "/m", "enforce_eager": "true"}),
        ("--enforce-eager /m", {"model": "/m", "enforce_eager": "true"}),
        ("--enable-lora true /m", {"model": "/m", "enable_lora": "true"}),
        ("-tp 2 /m --seed -1", {"model": "/m", "tensor_parallel_size": "2", "seed": "-1"}),
        ("python3 -m vllm.entrypoints.openai.api_server --model=/m", {"model": "/m"}),
        ("--lora-modules a=/x b=/y --port 1", {"lora_modules": '["a=/x", "b=/y"]', "port": "1"}),
    ],
)
def test_words_belong_to_the_flag_that_takes_them(words: str, expected: dict[str, str]) -> None:
    """A word behind a switch is the model, as in vLLM's parser."""
    flags = read_flags(words.split())
    assert {flag.name: flag.text for flag in flags} == expected
    assert not any(flag.problem for flag in flags)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("/m --model /n", "--model /n names another model"),
        ("/m /n", "only one word without a flag is read, the model (/m)"),
        ("--no-such-flag 3 4", "has no such flag"),
        ("--device cuda", "has no such flag"),  # of --device-ids and --device-memory-utilization
        ("--max-model-len", "a value is needed"),
        ("--served-model-name --port 1", "a value is needed"),
        ("--model-id m", "migrate --from tgi"),
        ("--api-keys s3cret", "has no such flag"),
        ("--model_name m", "write --served-model-name"),
        ("--model-dir m", "write --model"),
        ("--backend vllm", "leave it out"),
        ("--max_length=64", "write --max-model-len"),
        ("--model_revision main", "write --revision"),
        ("--config /no/such/file", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_a_problem(words: str, said: str) -> None:
    """Nothing is passed over."""
    assert any(said in flag.problem for flag in read_flags(words.split()))


def test_file_of_flags_comes_before_the_command_line(tmp_path: Path) -> None:
    """VLLM's --config is YAML, with or without underscores, and a flag beside it wins."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: /m\nmax_model_len: 64\nenable-lora: true\nenforce-eager: false\n"
        "served-model-name: [a, b]\nhf-overrides: {x: 1}\nseed: 7\n"
    )
    flags = {flag.name: flag for flag in read_flags(["--config", str(file), "--seed", "8"])}
    assert {name: flag.text for name, flag in flags.items()} == {
        "model": "/m", "max_model_len": "64", "enable_lora": "true", "seed": "8",
        "served_model_name": '["a", "b"]', "hf_overrides": '{"x": 1}', "enforce_eager": "false",
    }  # fmt: skip
    assert flags["max_model_len"].written == f"--max-model-len of {file}"


def test_flag_that_stands_twice_in_the_file_is_a_problem(tmp_path: Path) -> None:
    """YAML keeps the last of them; both spellings are one flag."""
    file = tmp_path / "config.yaml"
    file.write_text("max-model-len: 64\nseed: 1\nmax_model_len: 128\n")
    problems = [flag.problem for flag in read_flags(["--config", str(file)]) if flag.problem]
    assert problems == ["max-model-len stands there twice: give it once"]


def test_model_of_the_command_line_comes_before_the_file_s(tmp_path: Path) -> None:
    """As in vLLM; what is off in the file is off."""
    file = tmp_path / "config.yaml"
    file.write_text("model: /other\nenable-prefix-caching: false\nheadless: false\n")
    flags = read_flags(["/m", "--config", str(file)])
    assert {flag.name: (flag.text, flag.problem) for flag in flags} == {
        "model": ("/m", ""),
        "enable_prefix_caching": ("false", ""),
    }


def test_value_of_an_unknown_flag_is_not_repeated() -> None:
    """It may be a misspelt key."""
    (flag,) = read_flags(["--api_keys", "s3cret"])
    assert "s3cret" not in f"{flag.source} {flag.problem} {flag.text}"


@pytest.mark.parametrize(
    "word",
    ["--model /m --api-key s3cret", "--api-key s3cret", "/m --api-key s3cret", "--a=b --port 1"],
)
def test_a_command_line_in_one_word_is_a_problem(word: str) -> None:
    """It is not quoted: it may hold a key. What a flag has as its value is not looked into."""
    (flag,) = read_flags([word])
    assert flag.problem.startswith("this one word is a command line")
    assert "s3cret" not in f"{flag.source}{flag.written}{flag.problem}"
    (template,) = read_flags(["--chat-template", "{{ a }} --port {{ b }}"])
    assert not template.problem


def test_a_variable_for_kserve_s_name_of_the_model_names_vllm_s() -> None:
    """The closest name was the model itself."""
    (flag,) = read_variables({"SM_VLLM_MODEL_NAME": "m"})
    assert flag.problem.endswith("write SM_VLLM_SERVED_MODEL_NAME")


def test_what_is_wrong_in_the_file_names_it(tmp_path: Path) -> None:
    """The error quoted a flag that no one had typed."""
    file = tmp_path / "config.yaml"
    file.write_text("port: 1x\nno-such: 2\n")
    found = [flag.source for flag in read_flags(["--config", str(file)]) if flag.problem]
    assert found == [f"--port 1x of {file}", f"--no-such of {file}"]


def test_variables_may_negate_a_switch_and_name_a_file(tmp_path: Path) -> None:
    """As the flags that SageMaker's entry point makes of them."""
    file = tmp_path / "config.yaml"
    file.write_text("seed: 7\n")
    environ = {
        "SM_VLLM_NO_ENABLE_PREFIX_CACHING": "",
        "SM_VLLM_CONFIG": str(file),
        "SM_VLLM_DTYPE": "",
    }
    flags = read_variables(environ)
    assert {flag.name: flag.text for flag in flags} == {
        "enable_prefix_caching": "false",
        "seed": "7",
    }
    assert "SM_VLLM_CONFIG" in flags[1].written
