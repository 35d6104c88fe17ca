"""The routes that vLLM has with a switch, or with another model, answer as its own server's do.

With every switch on, a key, a prefix and invited sites; code for SageMaker's library; models that
hear and that classify.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration.bench.servers import their_command
from integration.compared_requests import Request
from integration.compared_switches import (
    KEY,
    ORIGIN,
    OTHER_ORIGIN,
    PREFIX,
    PROFILER,
    SEQUENCES,
    classed_requests,
    coded_requests,
    heard_requests,
    keyless_requests,
    sequence,
    switched_requests,
)
from integration.comparison import compare, vllm_server
from integration.conftest import RunningServer, running_server
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hook_files import SAGEMAKER_CODE

pytestmark = pytest.mark.vllm
AFTER: Final = {"CUSTOM_POST_PROCESS": "model:after"}
SWITCHES: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_COHERE_API": "1"}
OURS: Final = {
    **SWITCHES,
    "LMI_API_KEY": KEY,
    "OPTION_ENABLE_SCALE_OUT": "true",
    "OPTION_ROOT_PATH": PREFIX,
    "OPTION_ENABLE_TOKENIZER_INFO_ENDPOINT": "true",
    "OPTION_PROFILER_CONFIG": PROFILER,
    "SERVING_CORS_ALLOWED_ORIGIN": f"{ORIGIN},{OTHER_ORIGIN}",
    "SERVING_CORS_ALLOWED_METHODS": "POST, GET",
    "SERVING_CORS_ALLOWED_HEADERS": "content-type, x-mine",
}
THEIRS: Final = (
    "--enable-scale-out", "--enable-tokenizer-info-endpoint", "--profiler-config", PROFILER,
    "--api-key", KEY, "--root-path", PREFIX,
    "--allowed-origins", f'["{ORIGIN}", "{OTHER_ORIGIN}"]',
    "--allowed-methods", '["POST", "GET"]',
    "--allowed-headers", '["content-type", "x-mine"]',
)  # fmt: skip


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Our server with all of it: the other servers of the suite have no key and no prefix."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    pytest.importorskip("cohere", reason="needs the cohere SDK: make setup installs it")
    with running_server(tmp_path_factory.mktemp("switched"), "--demo", environ=OURS) as server:
        yield server


@pytest.fixture(scope="module")
def vllm_switched() -> Iterator[str]:
    """`vllm serve` over the embedded model with the same switches.

    Its worker is in a process of its own, as by default: that decides what `/collective_rpc` says.
    """
    environ = {**SWITCHES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with vllm_server(lambda port: [*their_command(port), *THEIRS], environ) as url:
        yield url


@pytest.fixture(scope="module")
def coded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with code for SageMaker's library."""
    folder = tmp_path_factory.mktemp("coded") / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    (folder / "model.py").write_text(SAGEMAKER_CODE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def coded(coded_folder: Path) -> Iterator[RunningServer]:
    """Our server over it."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    arguments = ("--model", str(coded_folder))
    with running_server(coded_folder.parent, *arguments, environ=AFTER) as server:
        yield server


@pytest.fixture(scope="module")
def vllm_coded(coded_folder: Path) -> Iterator[str]:
    """`vllm serve` over it, which is told where the code is."""
    environ = {**AFTER, "SAGEMAKER_MODEL_PATH": str(coded_folder)}

    def command(port: int) -> list[str]:  # the folder's path is part of `system_fingerprint`
        return [
            part.replace(str(DEMO_MODEL_DIR), str(coded_folder)) for part in their_command(port)
        ]

    with vllm_server(command, environ) as url:
        yield url


@pytest.fixture(scope="module")
def vllm_speech(speech_folder: Path) -> Iterator[str]:
    """`vllm serve` over the model that hears."""
    with vllm_server(lambda port: _serving(port, speech_folder, "--max-num-seqs", "4")) as url:
        yield url


@pytest.fixture(scope="module")
def ranking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny cross-encoder."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.tiny_models import bert_ranker  # noqa: PLC0415 (imports torch)

    folder = bert_ranker(tmp_path_factory.mktemp("ranker") / "model")
    properties = "option.enforce_eager=true\noption.dtype=fp32\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ranking(ranking_folder: Path) -> Iterator[RunningServer]:
    """Our server over it; no other server of the suite classifies."""
    with running_server(ranking_folder.parent, "--model", str(ranking_folder)) as server:
        yield server


@pytest.fixture(scope="module")
def vllm_ranking(ranking_folder: Path) -> Iterator[str]:
    """`vllm serve` over it."""
    with vllm_server(lambda port: _serving(port, ranking_folder)) as url:
        yield url


def _serving(port: int, folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
        "--host", "127.0.0.1", "--model", str(folder), "--served-model-name", "lmi",
        "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.05", *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "request_", [*switched_requests(), *keyless_requests()], ids=lambda each: each.name
)
def test_switched_routes_are_equal(
    request_: Request, switched: RunningServer, vllm_switched: str
) -> None:
    """Where they are to differ, they do, and in nothing else."""
    compare(request_, switched.url, vllm_switched)


@pytest.mark.parametrize("name", SEQUENCES)
def test_server_control_routes_match_vllm_serve(
    name: str, switched: RunningServer, vllm_switched: str
) -> None:
    """Step by step, until both are as they were."""
    for request in sequence(name):
        compare(request, switched.url, vllm_switched)


@pytest.mark.parametrize("request_", coded_requests(), ids=lambda each: each.name)
def test_code_for_sagemaker_s_library_answers_equally(
    request_: Request, coded: RunningServer, vllm_coded: str
) -> None:
    """Its handlers, and its middleware around every other route of the application."""
    compare(request_, coded.url, vllm_coded)


# A file whose bytes do not matter to the names.
@pytest.mark.parametrize(
    "number", range(len(heard_requests(b""))), ids=[one.name for one in heard_requests(b"")]
)
def test_transcriptions_are_equal(
    number: int, speech_server: RunningServer, vllm_speech: str
) -> None:
    """Forms, and what is none."""
    from tests.support.speech_model import tone  # noqa: PLC0415 (imports torch)

    compare(heard_requests(tone())[number], speech_server.url, vllm_speech)


@pytest.mark.parametrize("request_", classed_requests(), ids=lambda each: each.name)
def test_classes_are_equal(request_: Request, ranking: RunningServer, vllm_ranking: str) -> None:
    """Classes of texts, and scores of pairs."""
    compare(request_, ranking.url, vllm_ranking)
