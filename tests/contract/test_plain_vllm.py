"""The defects of vLLM and torch that are worked around, shown without our workarounds.

A test here fails once the installed release no longer has its defect: the workaround whose row
names it may then go, as soon as no supported release needs it. Defects that need an engine have
theirs beside the tests of the workaround.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.cpu.shared_memory import removed_once_joined
from lmi_vllm.engine.vllm.workarounds import unsent_media
from lmi_vllm.engine.vllm.workarounds.engine_context import ForkServerChild
from lmi_vllm.engine.vllm.workarounds.lost_cores import CoreWatch
from lmi_vllm.engine.vllm.workarounds.media_places import name_missing_places
from lmi_vllm.errors import EngineStartError
from lmi_vllm.messages import MediaPolicy
from tests.contract.conftest import LoopThread, start_demo_engine

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
# ruff: noqa: PLC0415 - each test imports what it is about: that may move or go


class Answering(BaseHTTPRequestHandler):
    """Answers each request, from an address that no client of ours may reach through vLLM."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server on the loopback."""
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.png"
        server.shutdown()


def test_plain_vllm_fetches_media_from_inside_the_network(url: str) -> None:
    """`media_urls/connector.py`: no address is forbidden."""
    from vllm.connections import HTTPConnection

    assert HTTPConnection().get_bytes(url, timeout=10) == b"secret"


def test_plain_vllm_decodes_images_of_any_size_that_we_bound() -> None:
    """`media_urls/decoded.py`: 1 KB of a file becomes 200 MB, as often as a request has it."""
    from vllm.multimodal.media import ImageMediaIO

    file, side = io.BytesIO(), 8200
    assert side**2 > MediaPolicy().max_pixels
    Image.new("1", (side, side)).save(file, "PNG")
    assert ImageMediaIO().load_bytes(file.getvalue()).media.size == (side, side)


def test_plain_vllm_asserts_a_place_for_each_picture() -> None:
    """A fault of the request is one of the server, on every route; ours is 400 with the reason."""
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    match: Any = BaseMultiModalProcessor._matched_updates_from_result
    place: dict[str, list[int | None]] = {"image": [None]}
    processor: Any = SimpleNamespace(apply=match)
    with pytest.raises(AssertionError, match="Failed to apply prompt replacement"):
        processor.apply(None, {}, place)
    name_missing_places(processor)
    with pytest.raises(ValueError, match="chat template has no place for this picture"):
        processor.apply(None, {}, place)


def test_plain_vllm_tries_a_wrong_item_as_each_kind() -> None:
    """`request_bodies`: the time for an item is that of all kinds, and all items are read."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    with pytest.raises(ValidationError) as raised:
        ResponsesRequest.model_validate({"input": [{"type": "wrong"}] * 5})
    assert raised.value.error_count() > 5 * 20


def test_plain_vllm_takes_a_batch_of_chats_that_is_to_be_streamed() -> None:
    """`request_bodies`: its own documentation says that it does not stream them."""
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    chat = [{"role": "user", "content": "x"}]
    request = BatchChatCompletionRequest.model_validate({"messages": [chat], "stream": True})
    assert "Streaming is not supported" in str(type(request).__doc__)


def test_plain_vllm_has_no_bound_for_texts_that_are_only_converted() -> None:
    """`text_lengths`: the renderer gets no limit from these routes."""
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeCompletionRequest,
    )

    config: Any = SimpleNamespace(max_model_len=8)
    for request in (TokenizeCompletionRequest(prompt="x"), DetokenizeRequest(tokens=[1])):
        assert request.build_tok_params(config).max_total_tokens is None


def test_plain_vllm_makes_every_pair_of_parts_that_it_cuts_off() -> None:
    """`scored_texts`: its tokenizers library does; its handler of scores cuts nothing before."""
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(DEMO_MODEL_DIR))
    text = "moon " * 40
    pairs = tokenizer._tokenizer  # type: ignore[attr-defined]
    pairs.enable_truncation(4)
    assert len(pairs.encode(text, text).overflowing) > 40


def test_plain_vllm_parser_takes_the_square_of_its_text() -> None:
    """`parsers`: four times the text takes about sixteen times as long."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.tokenizers import get_tokenizer

    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=[look])
    kind = ParserManager.get_parser("dots", enable_auto_tools=True)
    tokenizer = get_tokenizer(str(DEMO_MODEL_DIR))

    def seconds(count: int) -> float:
        began = time.thread_time()
        text = '{"name": "f", "arguments": {<dots_function_call>' * count
        kind(tokenizer, request.tools).parse(text, request, enable_auto_tools=True)
        return time.thread_time() - began

    seconds(100)
    assert seconds(1600) > 8 * seconds(400)


def test_plain_vllm_compiles_grammars_with_the_library_of_the_first(vllm_engine: Engine) -> None:
    """`grammar_trials/engine.py`: another request's own library is not asked; 0.33 refuses it."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager

    llm: Any = vllm_engine._llm  # type: ignore[attr-defined]
    manager: Any = StructuredOutputManager(llm.vllm_config)
    used: list[object] = []
    for library in ("guidance", "xgrammar"):
        outputs = StructuredOutputsParams(regex="a")
        outputs._backend = library
        asked = SimpleNamespace(params=outputs, structured_output_key=None, grammar=None)
        sampling = SamplingParams(structured_outputs=outputs)
        request = SimpleNamespace(structured_output_request=asked, sampling_params=sampling)
        try:
            manager.grammar_init(request)
        except VLLMValidationError as error:
            used.append(str(error).partition(".")[0])
        else:
            used.append(type(manager.backend).__name__)
    refused = "Structured output processing only supports one backend per engine"
    second = "GuidanceBackend" if workarounds.is_affected("vllm", "0.33") else refused
    assert used == ["GuidanceBackend", second]


def test_plain_vllm_leaves_out_bad_words_with_a_blank() -> None:
    """`bad_words.py`: inside a text a word has one, and other tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(str(DEMO_MODEL_DIR))
    params = SamplingParams(bad_words=["lies on"])
    params.update_from_tokenizer(tokenizer)
    forms = params.bad_words_token_ids or []
    assert [tokenizer.decode(form) for form in forms] == ["lies on"]


def test_plain_xgrammar_leaves_a_look_ahead_out() -> None:
    """`grammar_trials/ignored.py`: a pattern's is no error, as that of a regular expression is."""
    import xgrammar

    info = xgrammar.TokenizerInfo(["a", "b", '"', "</s>"], stop_token_ids=[3])
    schema = '{"type": "string", "pattern": "^(?!a)[ab]$"}'
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(schema)
    assert xgrammar.GrammarMatcher(compiled).accept_string('"a"')


def test_plain_vllm_compiles_a_function_while_it_serves() -> None:
    """`cpu.compilation.uncompiled`: three operations, compiled at the first request for them."""
    from vllm.v1.sample.sampler import batched_count_greater_than

    assert hasattr(batched_count_greater_than, "_torchdynamo_orig_callable")


HEADERS = "from torch._inductor import codecache as c; print(c._HEADER_DIR, c._HEADER_LOCK_DIR)"


def test_plain_torch_keeps_its_headers_beside_the_cache(tmp_path: Path) -> None:
    """`cpu.compilation.kept_headers`: whatever TORCHINDUCTOR_CACHE_DIR says."""
    # A user without a name is one on a bare machine.
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "USER": "lmi"}
    found = subprocess.run(
        [sys.executable, "-c", HEADERS],
        env=environ, check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    folders = found.stdout.split()
    assert len(folders) == 2
    assert not any(folder.startswith(str(tmp_path)) for folder in folders)


def test_plain_torch_has_no_finalize_loading_that_vllm_calls() -> None:
    """`cpu.compilation.nothing_to_finalize`: code of a CPU is read, and compiled once more."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    assert not hasattr(BundledAOTAutogradSerializableCallable, "finalize_loading")


def test_plain_vllm_looks_for_ngram_drafts_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start.py` leaves numba one thread; a release that uses more wants them."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(NgramProposer, "propose", lambda *_: None)  # compiles, for seconds
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=3
        ),
        model_config=SimpleNamespace(max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    assert NgramProposer(config).num_numba_thread_available == 1


@pytest.mark.parametrize(
    ("operators", "is_imported", "found"),
    [(None, False, "1"), ("3", False, "3"), (None, True, None)],
)
def test_engine_has_one_thread_of_numba(
    monkeypatch: pytest.MonkeyPatch, operators: str | None, is_imported: bool, found: str | None
) -> None:
    """Unless the operator says how many, or uses it here; the server's variable is not touched."""
    from lmi_vllm.engine.vllm.start import NUMBA_THREADS, starting
    from lmi_vllm.messages import EngineArguments

    monkeypatch.delenv(NUMBA_THREADS, raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    if is_imported:
        monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    if operators is not None:
        monkeypatch.setenv(NUMBA_THREADS, operators)
    with starting(EngineArguments({}, {})):
        assert os.environ.get(NUMBA_THREADS) == found
    assert os.environ.get(NUMBA_THREADS) == operators


class Nameless:
    """Answers every attribute, `__dict__` too, as libraries of llvmlite do, which numba imports."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return object()


@pytest.fixture
def odd_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with such an object is imported."""
    module = ModuleType("odd")
    module.library = Nameless()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd", module)


@pytest.mark.usefixtures("odd_module")
def test_plain_vllm_reads_the_names_of_any_object() -> None:
    """Each worker on a CPU does at its start."""
    from vllm.triton_utils import dispatcher

    with pytest.raises(AttributeError, match="has no attribute 'get'"):
        dispatcher._rebind_kernels([])
    with workarounds.apply(workarounds.Scope.COMPILED_CODE):
        dispatcher._rebind_kernels([])


class Counted(ModuleType):
    """A module that counts how often its names are read."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            type(self).reads += 1
        return super().__getattribute__(name)


def test_plain_vllm_looks_for_its_kernels_in_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forked engine each name that is read is memory of its own: 79 MB, and 0.3 s."""
    from vllm.triton_utils import dispatcher

    def kernel(size: int) -> int:
        return size

    wrapper = dispatcher.KernelOverride(kernel, kernel)
    users = ModuleType("users_worker")
    users.copied = kernel  # type: ignore[attr-defined]
    for name, module in (("users_worker", users), ("torch.counted", Counted("torch.counted"))):
        monkeypatch.setitem(sys.modules, name, module)
    before = Counted.reads
    with workarounds.apply(workarounds.Scope.COMPILED_CODE):
        dispatcher._rebind_kernels([(kernel, wrapper)])
        assert dispatcher._resolve_kernel(f"{__name__}.Counted") == (
            sys.modules[__name__],
            "Counted",
        )
    assert Counted.reads == before
    assert users.copied is wrapper
    names_of = workarounds.compilation.names_of(None)  # other tests import what has none
    monkeypatch.setattr(dispatcher, "vars", names_of, raising=False)
    dispatcher._rebind_kernels([(kernel, wrapper)])
    assert Counted.reads > before


@pytest.mark.usefixtures("odd_module")
def test_engine_is_forked_whatever_has_been_imported(
    run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an engine's death, when the server has imported an operator's code.

    What serves requests is imported beside the engine's process, and looked for after its start.
    """
    from lmi_vllm.engine.vllm import start

    threads: list[str] = []
    note = lambda: threads.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(start, "import_front_end", note)
    run(start_demo_engine(run).close())
    assert threads == ["lmi-vllm-beside", "lmi-vllm-engine-parent_0"]


def test_plain_vllm_forgets_a_picture_that_it_never_sent() -> None:
    """`unsent_media`: what was only read counts as what the engine has."""
    from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

    media = SimpleNamespace(mm_processor_cache_gb=1)
    model = SimpleNamespace(get_multimodal_config=lambda: media)
    item = ({"pixels": 1}, [])
    plain = LruKeyReplicatedSenderCache(model)
    assert plain.get_and_update_item(item, "x") == item
    assert plain.is_cached_item("x")
    assert plain.get_and_update_item(item, "x")[0] is None

    ours = unsent_media.once_sent(LruKeyReplicatedSenderCache)(model)
    for _ in range(2):
        assert not ours.is_cached_item("x")
        assert ours.get_and_update_item(item, "x") == item
    for sent in ({"mm_hashes": {"image": ["x", None, "never read"]}}, "a text", {}):
        ours.note_sent(sent)
    assert ours.is_cached_item("x")
    assert not ours.is_cached_item("never read")
    assert ours.get_and_update_item(None, "x")[0] is None
    ours.invalidate("x")
    assert not ours.is_cached_item("x")


def test_media_that_vllm_has_dropped_are_forgotten() -> None:
    """What counts as sent does not grow with what was ever sent."""
    from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

    media = SimpleNamespace(mm_processor_cache_gb=1000 / 2**30)  # for a few
    model = SimpleNamespace(get_multimodal_config=lambda: media)
    ours = unsent_media.once_sent(LruKeyReplicatedSenderCache)(model)
    for number in map(str, range(1000)):
        ours.get_and_update_item(({"pixels": number}, []), number)
        ours.note_sent({"encoder_prompt": {"mm_hashes": {"image": [number]}}})
    assert ours.is_cached_item("999")
    assert not ours.is_cached_item("0")
    assert 0 < len(ours._cache) < 100 > len(ours._sent)


def sleeping_process() -> Any:
    """Return a process that has been killed, or is about to end."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    return process


@dataclass
class LateEnd:
    """A process of an engine core, with another pipe that tells of its end."""

    process: Any
    sentinel: int
    name: str = "EngineCore"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)


def waiting_client(folder: Path) -> Any:
    """Return vLLM's client of a core that was started elsewhere; it waits for the core's answer."""
    from vllm.v1.engine.core_client import MPClient

    parallel = SimpleNamespace(
        enable_elastic_ep=False, data_parallel_size=1, data_parallel_index=0,
        data_parallel_size_local=1, data_parallel_rank_local=None, local_engines_only=True,
    )  # fmt: skip
    addresses = {"input_address": f"ipc://{folder}/in", "output_address": f"ipc://{folder}/out"}
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return MPClient(False, config, Any, False, addresses)


def see_with(*processes: Any, make: Callable[[], object]) -> None:
    """Make a client of these cores."""
    with CoreWatch() as watch:
        watch.note("engine_manager", SimpleNamespace(processes=[*processes]))
        make()


def fail(text: str) -> None:
    """Fail as a start does."""
    raise RuntimeError(text)


def test_plain_vllm_waits_for_a_core_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed after the handshake, or before it; ours ends the start and says how."""
    monkeypatch.setattr("vllm.v1.engine.core_client.VLLM_ENGINE_READY_TIMEOUT_S", 1)
    core = sleeping_process()
    core.name = "EngineCore"
    core.kill()
    with pytest.raises(TimeoutError):
        waiting_client(tmp_path)

    monkeypatch.setattr("vllm.v1.engine.core_client.VLLM_ENGINE_READY_TIMEOUT_S", 60)
    told = pytest.raises(RuntimeError, match="'EngineCore': -9")
    with workarounds.apply(workarounds.Scope.CLIENT), told:
        see_with(core, make=lambda: waiting_client(tmp_path))
    core.join()


@pytest.mark.parametrize("error", ["Failed core proc(s): {}", "another"])
def test_how_the_first_core_ended_is_said(error: str) -> None:
    """Its pipe ends 0.2 s before it does; another fault of a start stays what it is."""
    process, other = sleeping_process(), sleeping_process()
    reader, writer = multiprocessing.Pipe(duplex=False)
    unstarted = multiprocessing.get_context("fork").Process()
    cores = (LateEnd(process, reader.fileno()), other, unstarted)
    if error == "another":
        with pytest.raises(RuntimeError, match="another"):
            see_with(*cores, make=lambda: fail(error))
        see_with(*cores, make=bool)
    writer.close()
    other.terminate()  # as vLLM ends those that are left
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(RuntimeError, match=r"^Failed core proc\(s\): \{'EngineCore': -9\}$"):
        see_with(*cores, make=lambda: fail("Failed core proc(s): {}"))
    for one in (process, other):
        one.join()


class OfAForkServer(ForkServerChild):
    """A core whose fork server has ended: what multiprocessing knows of it then."""

    pid, exitcode, sentinel = 1, 255, 0


def test_end_of_the_fork_server_is_said() -> None:
    """It is no exit code of the core, which ends with it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.close()
    core = OfAForkServer(name="EngineCore")
    core.sentinel = reader.fileno()
    with pytest.raises(EngineStartError, match="the fork server ended, and the engine with it"):
        see_with(core, make=lambda: fail("Failed core proc(s): {}"))


def test_plain_vllm_does_not_say_how_a_process_ended() -> None:
    """A worker that is killed before it is ready; ours names the signal."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    def said() -> str:
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = sleeping_process()
        writer.close()
        process.kill()
        handle = SimpleNamespace(proc=process, ready_pipe=reader, rank=0)
        with pytest.raises(Exception, match=r"Worker|worker") as raised:
            WorkerProc.wait_for_ready([handle])
        process.join()
        return str(raised.value)

    assert "SIGKILL" not in said()
    with workarounds.apply(workarounds.Scope.ENGINE):
        assert "killed by SIGKILL" in said()


def test_plain_vllm_leaves_the_segments_of_its_ranks() -> None:
    """Each tensor-parallel start on a CPU: 4 MB a rank in /dev/shm; ours removes them."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "init_shm_manager"):  # as vLLM asks (cpu_communicator.py)
        pytest.skip("vLLM's kernels for a CPU without AVX-512 share no memory, so nothing is left")

    name = f"lmi-vllm-test-{os.getpid()}"
    segment = Path(f"/dev/shm/{name}_0")

    def join(_: object) -> int:
        handle: int = torch.ops._C.init_shm_manager(name, 1, 0, 1)
        torch.ops._C.join_shm_manager(handle, name)
        return handle

    group = SimpleNamespace(group_name=name, communicator=SimpleNamespace(rank=0))
    join(group)
    assert segment.exists()
    segment.unlink()
    removed_once_joined(join)(group)
    assert not segment.exists()
