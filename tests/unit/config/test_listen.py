"""Addresses and TLS files become a plan, or an error before any port opens."""

import pytest

from lmi_vllm.config.listen import (
    ListenAddress,
    ListenPlan,
    listen_plan,
)
from lmi_vllm.config.load import load_settings
from lmi_vllm.config.settings import CommandLine

HERE = "127.0.0.1"
PAIR = {"SERVING_CERTIFICATE_FILE": "/c.pem", "SERVING_PRIVATE_KEY_FILE": "/k.pem"}
PLANS = {
    "default": ({}, ListenPlan(ListenAddress("http", HERE, 8080))),
    "same address": (
        {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:8080"},
        ListenPlan(ListenAddress("http", HERE, 8080)),
    ),
    "two": (
        {"SERVING_MANAGEMENT_ADDRESS": "127.0.0.1"},
        ListenPlan(ListenAddress("http", HERE, 8080), ListenAddress("http", HERE, 8081)),
    ),
    "tls": (
        {"SERVING_INFERENCE_ADDRESS": "https://0.0.0.0", **PAIR},
        ListenPlan(ListenAddress("https", "0.0.0.0", 8443), None, "/c.pem", "/k.pem"),
    ),
    "platform port": (
        {"SAGEMAKER_BIND_TO_PORT": "9", "SERVING_MANAGEMENT_ADDRESS": "http://[::1]:10"},
        ListenPlan(ListenAddress("http", HERE, 9), ListenAddress("http", "::1", 10)),
    ),
    "unix": (
        {"SERVING_INFERENCE_ADDRESS": "unix:/run/s"},
        ListenPlan(ListenAddress("unix", path="/run/s")),
    ),
    "unix, but the platform wants a port": (
        {"SERVING_INFERENCE_ADDRESS": "unix:/run/s", "SAGEMAKER_BIND_TO_PORT": "9"},
        ListenPlan(ListenAddress("http", HERE, 9)),
    ),
}


@pytest.mark.parametrize(("environ", "plan"), PLANS.values(), ids=PLANS)
def test_listen_plan(environ: dict[str, str], plan: ListenPlan) -> None:
    """What is configured is what opens; left out ports are upstream's."""
    settings = load_settings(environ)
    assert settings.errors == ()
    assert listen_plan(settings.server) == plan


FAULTS = {
    "no key": (
        {"SERVING_INFERENCE_ADDRESS": "https://a:1", "SERVING_CERTIFICATE_FILE": "/c"},
        "inference_address=https://a:1 (SERVING_INFERENCE_ADDRESS) needs private_key_file",
    ),
    "no certificate for management": (
        {"SERVING_MANAGEMENT_ADDRESS": "https://a:1", "SERVING_PRIVATE_KEY_FILE": "/k"},
        "(SERVING_MANAGEMENT_ADDRESS) needs certificate_file",
    ),
    "files without https": (PAIR, "certificate_file (SERVING_CERTIFICATE_FILE) has no effect"),
    "one port, two schemes": (
        {"SERVING_MANAGEMENT_ADDRESS": "https://127.0.0.1:8080", **PAIR},
        "share a port but not",
    ),
    "no such port": ({"SERVING_MANAGEMENT_ADDRESS": "http://a:99999"}, "between 0 and 65535"),
}


@pytest.mark.parametrize(("environ", "said"), FAULTS.values(), ids=FAULTS)
def test_listen_faults_are_start_up_errors(environ: dict[str, str], said: str) -> None:
    """Plain text, or another port, is never served by mistake."""
    assert any(said in error for error in load_settings(environ).errors)


def test_listen_plan_flag_beats_unix() -> None:
    """`--port 0` asks for a port, also over a socket path."""
    settings = load_settings({"SERVING_INFERENCE_ADDRESS": "unix:/s"}, CommandLine(port=0))
    assert listen_plan(settings.server).inference == ListenAddress("http", HERE, 0)


def test_console_setting_is_one_of_three() -> None:
    """Anything else is an error that says what is allowed."""
    (error,) = load_settings({"LMI_CONSOLE": "maybe"}).errors
    assert "LMI_CONSOLE" in error
    assert "auto" in error
