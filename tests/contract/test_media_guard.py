"""vLLM's own media connector fetches through our guard, and keeps its rules for files and data."""

import asyncio
import base64
import io
import pickletools
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import numpy as np
import vllm.envs
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image, ImageFile
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from lmi_vllm.engine.vllm.workarounds.text_lengths import guard_lengths
from lmi_vllm.features.media_urls.budget import MediaBusyError
from lmi_vllm.features.media_urls.connector import GuardedConnection, guard_media
from lmi_vllm.features.media_urls.tensors import (
    check_pickle,
    guard_tensors,
    load_array_within,
    load_within,
)
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.telemetry.records import RequestRecord, enter_record

pytestmark = pytest.mark.vllm


def picture(width: int = 2, height: int = 2, kind: str = "PNG") -> bytes:
    """Return an image of one colour, which is a small file."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return file.getvalue()


def png() -> bytes:
    """Return a small image."""
    return picture()


def data_url(content: bytes, kind: str = "image/png") -> str:
    """Return a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Return the URL of an image on the loopback."""

    async def image(_: web.Request) -> web.Response:
        return web.Response(body=png(), content_type="image/png")

    app = web.Application()
    app.router.add_get("/image.png", image)
    async with TestServer(app, skip_url_asserts=True) as server:
        yield f"http://127.0.0.1:{server.port}/image.png"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an image, beside a secret."""
    allowed = tmp_path / "media"
    allowed.mkdir()
    (allowed / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    return allowed


async def test_connector_refuses_addresses_that_are_not_public(url: str) -> None:
    """The registered connector is ours; both of vLLM's ways to fetch are the request's fault."""
    guard_media(MediaPolicy())
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    with pytest.raises(VLLMValidationError, match="does not lead to a public address"):
        await connector.fetch_image_async(url)
    with pytest.raises(VLLMValidationError, match="does not lead to a public address"):
        connector.fetch_image(url)


async def test_connector_fetches_where_allowed(url: str) -> None:
    """With LMI_MEDIA_ALLOW_PRIVATE the same URL is an image; domains still count."""
    guard_media(MediaPolicy(allows_private=True))
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    image = await connector.fetch_image_async(url)
    assert image.size == (2, 2)
    held = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=["example.com"])
    with pytest.raises(ValueError, match="allowed domains"):
        await held.fetch_image_async(url)


class Budget:
    """VLLM 0.33's count of what one request's media weigh; the second image is too much."""

    def __init__(self) -> None:
        self.used = 0

    def charge(self, size: int) -> None:
        """Count; refuse as vLLM does."""
        self.used += size
        if self.used > len(png()):
            raise ValueError("Request media downloads exceed")


async def test_downloads_of_a_request_are_counted(url: str) -> None:
    """0.33 hands its count to every fetch of a request, older ones hand none."""
    guard_media(MediaPolicy(allows_private=True))
    connection = MEDIA_CONNECTOR_REGISTRY.load("http").connection
    budget = Budget()
    assert await connection.async_get_bytes(url, request_budget=budget) == png()
    assert budget.used == len(png())
    with pytest.raises(ValueError, match="downloads exceed"):
        await asyncio.to_thread(connection.get_bytes, url, request_budget=budget)


async def test_server_that_holds_much_media_answers_503() -> None:
    """The client can try again; it is not its own error."""

    async def fetch(*_: object, **__: object) -> bytes:
        raise MediaBusyError("try again later")

    client: Any = fetch
    connection = GuardedConnection(client, MediaPolicy(), ())
    with pytest.raises(GracefulHTTPError, match="try again later") as caught:
        await connection.async_get_bytes("https://h/a")
    assert caught.value.http_status == 503


async def test_connector_reads_files_below_the_allowed_folder_only(folder: Path) -> None:
    """`file:` needs allowed_local_media_path, and does not leave it; data URLs need nothing."""
    guard_media(MediaPolicy())
    closed = MEDIA_CONNECTOR_REGISTRY.load("http")
    for url, said in (
        (f"file://{folder}/a.png", "needs option.allowed_local_media_path"),
        ("data:,x", "a data: URL needs ;base64"),
        ("data:image/png,x", "a data: URL needs ;base64"),
    ):
        with pytest.raises(VLLMValidationError, match=said):
            await closed.fetch_image_async(url)
        with pytest.raises(VLLMValidationError, match=said):
            closed.fetch_image(url)
    held = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_local_media_path=str(folder))
    assert (await held.fetch_image_async(f"file://{folder}/a.png")).size == (2, 2)
    with pytest.raises(VLLMValidationError, match="and a file below it"):
        await held.fetch_image_async(f"file://{folder}/missing.png")
    with pytest.raises(ValueError, match="must be a subpath"):
        await held.fetch_image_async(f"file://{folder}/../secret.png")
    data = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    assert (await closed.fetch_image_async(data)).size == (2, 2)


async def test_large_image_is_refused_before_it_is_decoded(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its head: fetched, of a file or as data, alone or as a frame of a video."""
    guard_media(MediaPolicy(allows_private=True, max_pixels=3))
    decoded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_local_media_path=str(folder))
    for source in (url, f"file://{folder}/a.png", data_url(png())):
        with pytest.raises(ValueError, match=r"4 pixels; at most 3 .*LMI_MEDIA_MAX_PIXELS"):
            await connector.fetch_image_async(source)
        with pytest.raises(ValueError, match="LMI_MEDIA_MAX_PIXELS"):
            await asyncio.to_thread(connector.fetch_image, source)
    with pytest.raises(ValueError, match="LMI_MEDIA_MAX_PIXELS"):
        await connector.fetch_video_async(data_url(picture(kind="JPEG"), "video/jpeg"))
    assert not decoded


def tiff(tile: int) -> bytes:
    """Return a TIFF of 16 x 16 pixels that says it has one tile of `tile` x `tile`, packed."""
    packed = zlib.compress(bytes(tile * tile * 3))
    tags = [
        (256, 16), (257, 16), (258, 8), (259, 8), (262, 2), (277, 3), (322, tile), (323, tile),
        (324, 200), (325, len(packed)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", number, 4, 1, value) for number, value in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(200, b"\0") + packed


def icon(size: int) -> bytes:
    """Return an ICO whose list says 16 x 16, around a PNG of `size` x `size`."""
    inside = picture(size, size)
    return struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inside), 22) + inside


def png_head(width: int, height: int) -> bytes:
    """Return a PNG whose head names another size."""
    content = png()
    head = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan comes so many more times."""
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * count + b"\xff\xd9"


SMALL = (1 << 16, "the image is not PNG, JPEG, WEBP, GIF or BMP")
# The image, the most pixels, and what is said.
BOMBS = {
    "tiff": (tiff(300), SMALL),
    "ico": (icon(300), SMALL),
    "avif": (picture(300, 300, "AVIF").replace(struct.pack(">II", 300, 300), bytes(8), 1), SMALL),
    "gif": (picture(300, 300, "GIF").replace(struct.pack("<HH", 300, 300), b"\x10\0\x10\0", 1),
        (1 << 16, "90000 pixels; at most 65536")),
    "webp": (picture(300, 300, "WEBP"), (1 << 16, "90000 pixels; at most 65536")),
    "png head": (png_head(1 << 20, 1 << 20),
        (1 << 26, "the image cannot be read: Image size")),
    "broken png": (png()[:40], (1 << 26, "the image")),
    "jpeg": (scans(64), (1 << 26, "the image is a JPEG of more than 64 scans")),
    "text": (b"no image", SMALL),
}  # fmt: skip


@pytest.mark.parametrize(("content", "case"), BOMBS.values(), ids=BOMBS)
async def test_image_that_decodes_to_more_than_its_head_says_is_refused(
    content: bytes, case: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TIFF of 481 KiB was 488 MiB, six in a request 3.6 GB: it is the client's error now."""
    most, said = case
    decoded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    guard_media(MediaPolicy(max_pixels=most))
    with pytest.raises(ValueError, match=said):
        await MEDIA_CONNECTOR_REGISTRY.load("http").fetch_image_async(data_url(content))
    assert not decoded


async def test_other_formats_are_read_where_they_are_configured() -> None:
    """By LMI_MEDIA_IMAGE_FORMATS; the tile of a TIFF counts."""
    guard_media(MediaPolicy(max_pixels=1 << 16, image_formats=("TIFF", "ICO")))
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    assert (await connector.fetch_image_async(data_url(tiff(16)))).size == (16, 16)
    with pytest.raises(ValueError, match="90000 pixels; at most 65536"):
        await connector.fetch_image_async(data_url(tiff(300)))
    with pytest.raises(ValueError, match="is not TIFF or ICO"):
        await connector.fetch_image_async(data_url(png()))


async def test_plain_vllm_decodes_a_tile_that_is_larger_than_its_image() -> None:
    """Says when the list of formats may go."""
    found = MediaConnector().fetch_image(data_url(tiff(300)))
    assert found.size == (16, 16)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "MPO"])
async def test_common_images_are_read(kind: str) -> None:
    """MPO is what phones make, and is a JPEG."""
    guard_media(MediaPolicy())
    file = io.BytesIO()
    more = {"save_all": True, "append_images": [Image.new("RGB", (2, 2))]} if kind == "MPO" else {}
    Image.new("RGB", (2, 2)).save(file, kind, **more)
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    assert (await connector.fetch_image_async(data_url(file.getvalue()))).size == (2, 2)


def video(frames: int) -> str:
    """Return a video of frames of 64 x 48 pixels as a data URL."""
    cv2 = pytest.importorskip("cv2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 48))
        for number in range(frames):
            writer.write(np.full((48, 64, 3), number % 256, np.uint8))
        writer.release()
        return data_url(path.read_bytes(), "video/mp4")


FRAME = 64 * 48
# Frames (32 are kept), the most pixels of an image, and what is said.
VIDEOS = {
    "a frame": (2, FRAME - 1, "a frame of the video has 3072 pixels; at most 3071"),
    "frames that are kept": (32, 7 * FRAME, "more than 86016 pixels, 4 times LMI_MEDIA_MAX_PIXELS"),
    "all frames": (300, FRAME, "the video has 300 frames of 3072 pixels; at most 786432"),
}


@pytest.mark.parametrize(("frames", "most", "text"), VIDEOS.values(), ids=VIDEOS)
async def test_large_video_is_refused_before_it_is_decoded(
    frames: int, most: int, text: str
) -> None:
    """By its head: a frame, the frames that stay in memory, and those before the last of them."""
    enter_record(RequestRecord("id", "POST", "/r", "/r", "", "openai"))
    guard_media(MediaPolicy(max_pixels=most))
    with pytest.raises(ValueError, match=text):
        await MEDIA_CONNECTOR_REGISTRY.load("http").fetch_video_async(video(frames))


async def test_video_within_the_budget_is_decoded() -> None:
    """As many pixels as four of the largest images; what is no video is vLLM's to refuse."""
    enter_record(RequestRecord("id", "POST", "/r", "/r", "", "openai"))
    guard_media(MediaPolicy(max_pixels=8 * FRAME))
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    found, _ = await connector.fetch_video_async(video(40))
    assert found.shape == (32, 48, 64, 3)
    with pytest.raises(ValueError, match="open video"):
        await connector.fetch_video_async(data_url(b"no video", "video/mp4"))


LISTS = {
    "concat": b"ffconcat version 1.0\nfile a.mp4\n",
    "hls": b"#EXTM3U\n#EXTINF:1,\nhttp://192.0.2.1/a.ts\n",
    "sdp": b"v=0\ns=x\nc=IN IP4 127.0.0.1\nm=video 40000 RTP/AVP 96\n",
    "dash": b'<MPD profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"></MPD>',
}


@pytest.mark.parametrize("content", LISTS.values(), ids=LISTS)
async def test_list_of_other_files_is_no_video(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg opens what they name: a video of the server's own folder was decoded for a client."""
    (tmp_path / "a.mp4").write_bytes(base64.b64decode(video(4).partition(",")[2]))
    monkeypatch.chdir(tmp_path)
    guard_media(MediaPolicy())
    connector = MEDIA_CONNECTOR_REGISTRY.load("http")
    with pytest.raises(ValueError, match="a list of other files, or names a stream"):
        await connector.fetch_video_async(data_url(content, "video/mp4"))


async def test_images_of_a_request_are_counted_together() -> None:
    """Over its messages, for each of which vLLM makes a connector; another request starts again."""
    guard_media(MediaPolicy(max_pixels=4))

    async def request(count: int) -> None:
        enter_record(RequestRecord("id", "POST", "/r", "/r", "", "openai"))
        for _ in range(count):
            await MEDIA_CONNECTOR_REGISTRY.load("http").fetch_image_async(data_url(png()))

    await asyncio.create_task(request(4))
    await asyncio.create_task(request(4))
    with pytest.raises(ValueError, match="more than 16 pixels"):
        await asyncio.create_task(request(5))


async def test_audio_of_a_request_is_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is a small file: a request of hundreds of them would fill the machine's memory."""
    soundfile = pytest.importorskip("soundfile")
    # The variable itself may be cached: an engine of another file may run in this process.
    monkeypatch.setitem(vars(vllm.envs), "VLLM_MAX_AUDIO_DECODE_BYTES", 4000)
    guard_media(MediaPolicy())
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1000, "int16"), 8000, format="FLAC")
    sent = data_url(file.getvalue(), "audio/flac")
    record = RequestRecord("id", "POST", "/r", "/r", "", "openai")

    async def request(count: int) -> None:
        enter_record(record)
        for _ in range(count):
            sound, _ = await MEDIA_CONNECTOR_REGISTRY.load("http").fetch_audio_async(sent)
            assert sound.nbytes == 4000

    await asyncio.create_task(request(4))
    for _ in range(2):  # the second is refused before it is decoded
        with pytest.raises(ValueError, match="more than 16000 bytes when it is decoded"):
            await asyncio.create_task(request(1))
    assert record.decoded_audio == 20000


@pytest.mark.parametrize("is_shared", [False, True])
async def test_names_of_media_are_the_client_s_own(*, is_shared: bool) -> None:
    """No client can have the name of another's, or a digest; servers that share media use names."""

    async def as_given(prompt: Any, _: object) -> Any:
        return prompt

    config = SimpleNamespace(ec_transfer_config=object() if is_shared else None)
    renderer = SimpleNamespace(
        tokenize_prompt_async=as_given, tokenize_prompt=None, tokenizer=None, config=config
    )
    guard_lengths(renderer, 1000)
    found = []
    for client in ("192.0.2.1", "192.0.2.2"):
        enter_record(RequestRecord("", "", "", "", client, ""))
        prompt = {"prompt": "x", "multi_modal_uuids": {"image": ["0af3", None], "audio": "0af3"}}
        params = SimpleNamespace(max_total_tokens=9, truncate_prompt_tokens=None)
        tokenized = await renderer.tokenize_prompt_async(prompt, params)
        found.append(tokenized["multi_modal_uuids"])
    enter_record(None)
    prefixes = ["", ""] if is_shared else ["192.0.2.1|", "192.0.2.2|"]
    assert found == [{"image": [f"{one}0af3", None], "audio": f"{one}0af3"} for one in prefixes]


@pytest.mark.parametrize(
    ("device", "is_prefix", "is_refused"),
    [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)],
)
async def test_image_that_a_cpu_reads_in_one_direction_is_refused(
    device: str, *, is_prefix: bool, is_refused: bool
) -> None:
    """PaliGemma and Gemma 3: the answer was wrong, with 200. A text is served."""
    from vllm.config import ModelConfig  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415

    assert hasattr(ModelConfig, "is_mm_prefix_lm")
    assert not CPUAttentionBackend.supports_mm_prefix()  # where it does, the refusal goes

    async def as_given(prompt: Any, _: object) -> Any:
        return prompt

    config = SimpleNamespace(
        ec_transfer_config=None, device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_mm_prefix_lm=is_prefix),
    )  # fmt: skip
    renderer = SimpleNamespace(
        tokenize_prompt_async=as_given, tokenize_prompt=None, tokenizer=None, config=config
    )
    guard_lengths(renderer, 1000)
    params = SimpleNamespace(max_total_tokens=9, truncate_prompt_tokens=None)
    text, picture = {"prompt": "x"}, {"prompt": "x", "multi_modal_data": {"image": [object()]}}
    assert await renderer.tokenize_prompt_async(text, params) == text
    if is_refused:
        with pytest.raises(ValueError, match="an image: vLLM on a CPU reads it in one"):
            await renderer.tokenize_prompt_async(picture, params)
    else:
        assert await renderer.tokenize_prompt_async(picture, params) == picture


def zipped_tensor(size: int) -> bytes:
    """Return the file of a small tensor whose storage is compressed, and has that many bytes."""
    import torch  # noqa: PLC0415 (slow to import)

    stored, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2, 64), stored)
    with (
        zipfile.ZipFile(stored) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, bytes(size) if name.endswith("/data/0") else source.read(name))
    return packed.getvalue()


def test_tensor_of_a_client_is_no_larger_than_its_bytes() -> None:
    """Compressed, sparse or repeated: each is refused before, or without, the memory it names."""
    import torch  # noqa: PLC0415 (slow to import)

    def load(content: bytes) -> Any:
        return load_within(torch.load, io.BytesIO(content), weights_only=True)

    def saved(tensor: object) -> bytes:
        file = io.BytesIO()
        torch.save(tensor, file)
        return file.getvalue()

    plain = torch.randn(5, 128)
    assert torch.equal(load(saved(plain)), plain)
    sparse = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (30000, 30000), check_invariants=True
    )
    for content in (
        zipped_tensor(1 << 22), saved(sparse), saved(torch.zeros(1).expand(10**6, 10**5)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="bytes when it is loaded"):
            load(content)
    for content in (b"PK\x03\x04", b"garbage", b"", saved({"a": 1})):
        with pytest.raises(ValueError, match="a tensor cannot be read"):
            load(content)


class Calls:
    """Pickled as a call of what torch trusts."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        function, *arguments = self.call
        return function, tuple(arguments)


CALLS = {
    "bytearray": Calls(bytearray, 2 << 30),
    "Counter": Calls(Counter, "ab" * 1000),
    "set": Calls(set, [1, 2]),
    "list": [1, 2],
    "long text": "x" * (1 << 17),
}


@pytest.mark.parametrize("value", CALLS.values(), ids=CALLS)
def test_pickle_of_a_client_has_a_tensor_only(value: object) -> None:
    """554 bytes took 2 GiB, or 6.6 s of the event loop: such a call is not made."""
    import torch  # noqa: PLC0415 (slow to import)

    file = io.BytesIO()
    torch.save(value, file)
    made: list[object] = []
    with pytest.raises(ValueError, match=r"its pickle has more than (a tensor|65536 bytes)"):
        load_within(lambda *given, **_: made.append(given), file, weights_only=True)
    assert not made


def test_pickle_that_repeats_a_tuple_in_itself_is_refused() -> None:
    """2 to the power of its depth is what comparing or hashing it takes."""
    nested = b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b"."
    assert list(pickletools.genops(nested))
    with pytest.raises(ValueError, match="repeats more than texts"):
        check_pickle(nested)


def test_archive_with_two_lists_of_entries_is_refused() -> None:
    """Python reads the one at the end, torch the one that the end names: another pickle."""
    import torch  # noqa: PLC0415 (slow to import)

    file, other = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(3), file)
    torch.save(CALLS["bytearray"], other)
    for content in (
        other.getvalue() + file.getvalue(), file.getvalue() + b"x", file.getvalue()[:-1],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"is not what torch\.save writes"):
            load_within(torch.load, io.BytesIO(content), weights_only=True)


def test_saved_tensors_are_read() -> None:
    """Of every type, as parameters, with gradients and sparse, if that is no smaller."""
    import torch  # noqa: PLC0415 (slow to import)

    plain = torch.ones(3, 64)
    kinds = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int64)
    sparse = plain.to_sparse()
    for tensor in (*(plain.to(kind) for kind in kinds), torch.nn.Parameter(plain), sparse):
        file = io.BytesIO()
        torch.save(tensor, file)
        found = load_within(torch.load, io.BytesIO(file.getvalue()), weights_only=True)
        assert torch.equal(found.to_dense().double(), tensor.to_dense().double())


def test_array_of_a_client_is_no_larger_than_its_bytes() -> None:
    """Numpy makes the whole array that a head names before it reads one value."""
    file = io.BytesIO()
    np.save(file, np.ones((3, 4)))
    content = file.getvalue()
    assert load_array_within(np.load, io.BytesIO(content)).shape == (3, 4)
    large = content.replace(b"(3, 4), }          ", b"(1 << 0, 4), }     ")
    for bad in (content.replace(b"(3, 4), }     ", b"(300000, 4), }"), large, b"x", b""):
        with pytest.raises(ValueError, match=r"bytes when it is loaded|cannot be read"):
            load_array_within(np.load, io.BytesIO(bad))


def test_plain_torch_calls_what_is_no_tensor() -> None:
    """Says when `check_pickle` may go."""
    import torch  # noqa: PLC0415 (slow to import)

    load, file = getattr(torch.load, "args", (torch.load,))[0], io.BytesIO()
    torch.save(Calls(bytearray, 1 << 20), file)
    file.seek(0)
    assert load(file, weights_only=True) == bytes(1 << 20)


def test_large_tensor_of_a_prompt_is_the_clients_error(tmp_path: Path) -> None:
    """By vLLM's own function, which the handlers call: 400 that names the field."""
    from vllm.renderers.embed_utils import safe_load_prompt_embeds  # noqa: PLC0415

    guard_tensors()
    guard_tensors()  # once is enough
    config: Any = SimpleNamespace(enable_prompt_embeds=True)
    with pytest.raises(VLLMValidationError, match=r"prompt_embeds.*bytes when it is loaded"):
        safe_load_prompt_embeds(config, base64.b64encode(zipped_tensor(1 << 22)))
    import torch  # noqa: PLC0415 (slow to import)

    torch.save(torch.zeros(3), tmp_path / "x.pt")  # a file of the server's own
    assert torch.equal(torch.load(tmp_path / "x.pt"), torch.zeros(3))


def test_plain_vllm_loads_a_tensor_that_is_larger_than_its_bytes() -> None:
    """Says when `guard_tensors` may go: then vLLM refuses it by itself."""
    import torch  # noqa: PLC0415 (slow to import)
    from vllm.renderers.embed_utils import safe_load_prompt_embeds  # noqa: PLC0415

    ones, file = torch.ones(1, 100).expand(10_000, 100), io.BytesIO()
    torch.save(ones, file)
    content = file.getvalue()
    config: Any = SimpleNamespace(
        enable_prompt_embeds=True,
        get_hidden_size=lambda: 100,
        hf_text_config=SimpleNamespace(),
        dtype=torch.float32,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", getattr(torch.load, "args", (torch.load,))[0])
        tensor = safe_load_prompt_embeds(config, base64.b64encode(content))
    assert tensor.numel() * tensor.element_size() > len(content)
