"""The rule that keeps secrets out of logs, `explain` and errors, for text of every form."""

import time

import pytest

from lmi_vllm.config.secrets import is_secret, mask_text, mask_urls
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.explain import FORMATS
from tests.support.assembled import explain, load_settings, translate_start

JSON = (  # text, as it is shown
    ('{"token": ["s3cret"], "a": 1}', '{"token": "***", "a": 1}'),
    ('{"apikey": {"v": "s3cret", "w": []}, "a": 1}', '{"apikey": "***", "a": 1}'),
    ('{"a": {"password": 998877}, "b": 2}', '{"a": {"password": "***"}, "b": 2}'),
    ('{"token": "a\\"b", "a": 1}', '{"token": "***", "a": 1}'),
    ('{"token": true, "secret": null}', '{"token": true, "secret": null}'),
    ('{"my token": "s3cret"}', '{"my token": "***"}'),
)
NO_JSON = (  # a mistake in the text, which an error quotes
    ('{"token": ["s3cret"], }', '{"token": "***", }'),
    ('{"token": ["]", {"v": "s3cret', '{"token": "***"'),
    ('{"token": "s3c"ret"}', '{"token": "***"}'),
    ('{"token": s3c, ret}', '{"token": "***"}'),
    ("{'token': 's3cret', 'a': 1}", "{'token': \"***\", 'a': 1}"),
    ("{token: s3cret}", '{token: "***"}'),
    ('{"token": }', '{"token": }'),
)


@pytest.mark.parametrize(("text", "shown"), JSON + NO_JSON)
def test_member_of_a_secret_name_is_hidden(text: str, shown: str) -> None:
    """Whatever its value is, and where the text is no JSON up to the end that was meant."""
    assert mask_text("hf_overrides", text) == shown
    assert mask_text("hf_overrides", shown) == shown


PAIRS = (
    ("HF_TOKEN=s3,cret,A=1,2", "HF_TOKEN=***,***,A=1,2"),
    ('{"HF_TOKEN": "s3cret"}', '{"HF_TOKEN": "***"}'),
    ("A=1,B=x=2", "A=1,B=x=2"),
)


@pytest.mark.parametrize(("text", "shown"), PAIRS)
def test_pair_of_a_secret_name_is_hidden(text: str, shown: str) -> None:
    """A comma in its value does not end it for the eye."""
    assert mask_text("env", text) == shown


OF_THE_MODEL = (
    "max_tokens", "tokenizer", "pad_token_id", "image_token_index", "stop_token_ids", "pass_config",
    "num_key_value_heads", "linear_key_head_dim", "act_per_token", "kv_cache_per_token_head_scales",
    "suffix_decoding_min_token_prob",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_number_of_the_model_is_shown(name: str) -> None:
    """Names of vLLM's and of models' own configurations have a secret's word without one."""
    text = f'{{"{name}": [8]}}'
    assert not is_secret(name)
    assert mask_text("hf_overrides", text) == text


@pytest.mark.parametrize("name", ["DEVELOPER_TOKEN", "token", "key", "KEY_ID"])
def test_secret_name_like_one_of_the_model_is_one(name: str) -> None:
    """`DEVELOPER_TOKEN` ends as `act_per_token` does."""
    assert is_secret(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OPTION_HF_OVERRIDES", '{"token": ["s3cret"], "apikey": {"v": "s3cret"}}'),
        ("OPTION_HF_OVERRIDES", '{"token": ["s3cret"], }'),
        ("OPTION_FOOBAR", '{"token": ["s3cret"]}'),
        ("OPTION_ENV", "HF_TOKEN=a,s3cret"),
    ],
)
def test_no_message_shows_a_secret(name: str, text: str) -> None:
    """Values, unknown names and errors."""
    environ = {"OPTION_MODEL_ID": "a/b", "SERVING_MODEL_STORE": "/nonexistent", name: text}
    explanation = explain(translate_start(load_settings(environ), environ, Devices(1)))
    shown = FORMATS["json"](explanation)
    assert name in shown
    assert "s3cret" not in shown


URLS = (  # text, as it is shown
    ("s3://u:s3cret@b/p", "s3://***@b/p"),
    ("http://u:s3@cret@h:80/p@1", "http://***@h:80/p@1"),
    ("http://u:s3/cret@h/p", "http://***@h/p"),
    ("http://:s3/cret@h/p", "http://***@h/p"),
    ("gs://b/p?X-Goog-Signature=s3cret&a=1", "gs://b/p?X-Goog-Signature=***&a=1"),
    ("/p?x-oss-security-token=s3cret", "/p?x-oss-security-token=***"),
    ("/p?a=1&password=s3cret", "/p?a=1&password=***"),
)


@pytest.mark.parametrize(("text", "shown"), URLS)
def test_secret_in_a_url_is_hidden(text: str, shown: str) -> None:
    """Also where the login was not encoded as it should be."""
    assert mask_urls(f"a@b: {text} a@b") == f"a@b: {shown} a@b"


HARMLESS = (
    "http://127.0.0.1:8080/a@b", "http://[::1]:8080/a@b", "https://h/@scope/p", "s3://b/x:y@z",
    "https://h/a?b=c&keys=d", "file:///a:b@c", "http://h:80 a@b", "http://h: u/x@y",
)  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_url_without_a_secret_is_shown(text: str) -> None:
    """An @ in a path is no login, and a port is no password."""
    assert mask_urls(text) == text


@pytest.mark.parametrize("part", ["://a:b/", "://", "a", "://a:", "://@", "?", "&x-a-"])
def test_long_line_is_masked_fast(part: str) -> None:
    """Every line of the log is checked: the time grows with its length alone."""
    text = "://" + part * (200_000 // len(part))
    start = time.thread_time()  # of the processor: the machine may be busy
    mask_urls(text)
    assert time.thread_time() - start < 2
